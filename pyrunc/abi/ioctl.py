"""ioctl(2) request codes: namespaces, terminals, block layer, vsock. The same on x86-64 and arm64 (asm-generic/ioctl.h)."""

NS_GET_NSTYPE = 0xB703

TIOCSCTTY = 0x540E
TIOCSWINSZ = 0x5414
TIOCSPTLCK = 0x40045431
TIOCGPTPEER = 0x5441

SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1

FS_IOC_ENABLE_VERITY = 0x40806685
FS_IOC_MEASURE_VERITY = 0xC0046686
