"""The Python side of the keeper (pause/keeper.c): its client."""
