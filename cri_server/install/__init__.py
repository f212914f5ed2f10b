"""What makes a machine a node: files, their texts from the tables that the programs are made of,
and who puts them there."""
