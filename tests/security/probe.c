/* What a hostile process does: one word of argv[1] is one attack. It runs inside a container or
 * beside it, is static, and says on stdout what the kernel answered; a test judges that. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* swap A B: exchanges two names until SIGTERM; then prints how many times. */
static volatile sig_atomic_t ended;

static void end(int signal)
{
	(void)signal;
	ended = 1;
}

static int swap(const char *a, const char *b, int pause_us)
{
	unsigned long count = 0;

	signal(SIGTERM, end);
	puts("swapping");
	fflush(stdout);
	while (!ended) {
		if (syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, 2 /* RENAME_EXCHANGE */) == 0)
			count++;
		if (pause_us)
			usleep(pause_us);
	}
	if (count % 2)
		syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, 2);
	printf("%lu\n", count);
	return 0;
}

/* ---- spy SECONDS: looks into every process called pyrunc:* until its name changes ---- */

/* Alive and called pyrunc:*, by "PID (NAME) STATE …". */
static int ours(int pid)
{
	char path[64], stat[128] = "", *end;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY);
	if (fd < 0)
		return 0;
	if (read(fd, stat, sizeof stat - 1) < 0)
		stat[0] = 0;
	close(fd);
	end = strrchr(stat, ')');
	return strstr(stat, "(pyrunc:") && end && end[2] != 'Z' && end[2] != 'X';
}

static void tell(int pid, const char *what, long result, int error)
{
	/* A result counts only if the process is called pyrunc:* before and after: then it was
	 * certainly ours. */
	if (ours(pid))
		printf("%s %s\n", what, result >= 0 ? "DONE" : strerrorname_np(error));
}

static void look_into(int pid)
{
	static const char *const links[] = { "root", "cwd", "exe" };
	char path[64], target[256];
	long result;

	for (unsigned i = 0; i < sizeof links / sizeof *links; i++) {
		snprintf(path, sizeof path, "/proc/%d/%s", pid, links[i]);
		errno = 0;
		result = readlink(path, target, sizeof target);
		tell(pid, links[i], result, errno);
	}
	snprintf(path, sizeof path, "/proc/%d/exe", pid);
	errno = 0;
	int fd = open(path, O_WRONLY);
	tell(pid, "write-exe", fd, errno);
	if (fd >= 0)
		close(fd);
	for (int n = 0; n < 12; n++) {
		snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, n);
		errno = 0;
		result = readlink(path, target, sizeof target - 1);
		if (result >= 0 || errno != ENOENT)
			tell(pid, "fd", result, errno);
	}
	static const char *const files[] = { "environ", "mem", "maps" };
	for (unsigned i = 0; i < sizeof files / sizeof *files; i++) {
		snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
		errno = 0;
		fd = open(path, O_RDONLY);
		result = fd;
		if (fd >= 0 && i > 1 && read(fd, target, 1) == 0) {
			/* a process that is ending has no memory any more: maps opens, and is
			 * empty */
			result = -1;
			errno = ESRCH;
		}
		tell(pid, files[i], result, errno);
		if (fd >= 0)
			close(fd);
	}
	errno = 0;
	result = syscall(SYS_ptrace, PTRACE_SEIZE, pid, 0, 0);
	tell(pid, "ptrace", result, errno);
	int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd >= 0) {
		errno = 0;
		result = syscall(SYS_pidfd_getfd, pidfd, 3, 0);
		tell(pid, "getfd", result, errno);
		close(pidfd);
	}
}

static int spy(double seconds)
{
	double deadline = now() + seconds;
	unsigned long seen = 0;

	puts("spying");
	fflush(stdout);
	signal(SIGTERM, end);
	while (!ended && now() < deadline) {
		DIR *proc = opendir("/proc");
		struct dirent *entry;

		while (proc && (entry = readdir(proc))) {
			int pid = atoi(entry->d_name);

			if (pid > 0 && pid != getpid() && ours(pid)) {
				seen++;
				look_into(pid);
			}
		}
		if (proc)
			closedir(proc);
	}
	printf("seen %lu\n", seen);
	return 0;
}

/* overwrite SECONDS: open the executable of every other process, then write through that descriptor
 * as soon as possible. */
static int overwrite(double seconds)
{
	double deadline = now() + seconds;
	unsigned long opened = 0, written = 0;

	puts("hunting");
	fflush(stdout);
	signal(SIGTERM, end);
	while (!ended && now() < deadline) {
		DIR *proc = opendir("/proc");
		struct dirent *entry;

		while (proc && (entry = readdir(proc))) {
			char path[64], self[64];
			int pid = atoi(entry->d_name);

			if (pid <= 0 || pid == getpid() || !ours(pid))
				continue;
			snprintf(path, sizeof path, "/proc/%d/exe", pid);
			int fd = open(path, O_RDONLY);
			if (fd < 0)
				continue;
			if (!opened++) {
				puts("prey");
				fflush(stdout);
			}
			snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
			for (double until = now() + 0.2; now() < until;) {
				int out = open(self, O_WRONLY | O_TRUNC);
				if (out >= 0) {
					written += write(out, "#!/evil\n", 8) > 0;
					close(out);
					break;
				}
			}
			close(fd);
		}
		if (proc)
			closedir(proc);
	}
	printf("opened %lu written %lu\n", opened, written);
	return 0;
}

static int answer(const char *what, long result, int error)
{
	printf("%s %s\n", what, result >= 0 ? "DONE" : strerrorname_np(error));
	return 0;
}

/* type TEXT: push characters into the terminal that is descriptor 0 */
static int type(const char *text)
{
	long result = 0;

	for (; *text && result >= 0; text++)
		result = ioctl(0, TIOCSTI, text);
	answer("sti", result, errno);
	result = ioctl(0, TIOCSCTTY, 0);
	return answer("sctty", result, errno);
}

static int call(const char *how, const char *folder)
{
	long result = -1;

	errno = 0;
#ifdef __x86_64__
	if (!strcmp(how, "native"))
		result = syscall(SYS_mkdir, folder, 0755);
	else if (!strcmp(how, "x32"))
		result = syscall(SYS_mkdir | 0x40000000, folder, 0755);
	else if (!strcmp(how, "i386")) {
		/* the old gate takes 32-bit pointers: the path lies low */
		static char low[64];
		strncpy(low, folder, sizeof low - 1);
		__asm__ volatile("int $0x80" : "=a"(result)
			: "a"(39), "b"(low), "c"(0755) : "memory");
		if (result < 0) {
			errno = (int)-result;
			result = -1;
		}
	}
#else
	(void)how;
	result = syscall(SYS_mkdirat, AT_FDCWD, folder, 0755);
#endif
	return answer(how, result, errno);
}

/* sockets FAMILY: a new socket by the native call, by i386's, and by i386's multiplexer of socket
 * calls; then two calls of the multiplexer on a socket that is there already */
static int sockets(int family)
{
	long s = syscall(SYS_socket, family, SOCK_STREAM, 0);

	answer("native", s, errno);
#ifdef __x86_64__
	/* the old gate takes 32-bit pointers: a static program's data lies low */
	static unsigned low[3];
	struct { const char *name; long number, first, second, third; } calls[] = {
		{ "i386", 359, family, SOCK_STREAM, 0 },
		{ "socketcall", 102, 1, (long)low, 0 },
		{ "listen", 102, 4, (long)low, 0 },
	};

	for (int i = 0; i < 3; i++) {
		long result;

		low[0] = i == 2 ? (unsigned)socket(AF_UNIX, SOCK_STREAM, 0) : (unsigned)family;
		low[1] = SOCK_STREAM;
		__asm__ volatile("int $0x80" : "=a"(result)
			: "a"(calls[i].number), "b"(calls[i].first), "c"(calls[i].second),
			  "d"(calls[i].third) : "memory");
		answer(calls[i].name, result < 0 ? -1 : result, result < 0 ? (int)-result : 0);
	}
#endif
	return 0;
}

/* connect NAME: to an abstract socket */
static int connect_to(const char *name)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int s = socket(AF_UNIX, SOCK_STREAM, 0);

	strncpy(address.sun_path + 1, name, sizeof address.sun_path - 2);
	return answer("connect", connect(s, (void *)&address, sizeof(short) + 1 + strlen(name)),
		errno);
}

/* key NAME: find a user key by the session keyring, which needs possession: the same uid is not
 * enough */
static int key(const char *name)
{
	long found = syscall(SYS_keyctl, 10 /* SEARCH */, -3 /* session */, "user", name, 0);

	return answer("key", found, errno);
}

int main(int argc, char **argv)
{
	const char *word = argc > 1 ? argv[1] : "";

	setlinebuf(stdout);
	if (!strcmp(word, "swap"))
		return swap(argv[2], argv[3], argc > 4 ? atoi(argv[4]) : 0);
	if (!strcmp(word, "spy"))
		return spy(atof(argv[2]));
	if (!strcmp(word, "overwrite"))
		return overwrite(atof(argv[2]));
	if (!strcmp(word, "type"))
		return type(argv[2]);
	if (!strcmp(word, "call"))
		return call(argv[2], argv[3]);
	if (!strcmp(word, "sockets"))
		return sockets(atoi(argv[2]));
	if (!strcmp(word, "connect"))
		return connect_to(argv[2]);
	if (!strcmp(word, "key"))
		return key(argv[2]);
	if (!strcmp(word, "uid"))
		return printf("%d\n", (int)geteuid()) < 0;
	return 2;
}
