"""Numbers of the Linux ABI: flags, request codes and call numbers, by the names of the manual
pages. Data only."""
