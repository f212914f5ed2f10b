/* The keeper outlives the server and the shims, all of which may be killed at any time. It is the
 * ancestor and subreaper of the shims: it reaps the processes that a dead shim leaves, and notes
 * how they ended. It also stores descriptors by name.
 *
 * Started as: keeper FOLDER. It locks FOLDER/keeper.lock (one instance; the file has its pid),
 * listens at FOLDER/keeper.sock (mode 0600, only uid 0) and continues as a child with its own
 * session: when the first process has exited with 0, the keeper listens. Exit codes: 2 the folder
 * cannot be used, 3 another keeper has the lock. It ends at SIGTERM; after IDLE_MS without a
 * connection, a child or a stored descriptor; and, without a connection, when the lock file was
 * deleted, because no server can find this keeper then.
 *
 * A packet (SOCK_SEQPACKET) is one message, a request or its answer, in the machine's byte order:
 * `struct message`, then the name, then the data. Descriptors are sent with it. The other side is
 * pyrunc/keeper/client.py. An answer with an `error` other than 0, an errno, has nothing else.
 *
 *   HELLO  answer: pid: the keeper's; count: stored entries
 *   PUT    name, data, descriptors; replaces an entry of this name
 *   GET    name
 *          answer: data, copies of the descriptors
 *   DROP   name
 *          answer: ENOENT without an entry
 *   LIST   name: a prefix; count: entries to skip
 *          answer: data: names, each with its NUL; count: entries to skip in the next request, 0 at
 *          the end
 *   START  count: of arguments; data: for each descriptor the u32 number that it gets in the
 *          new process, then arguments and environment, each with its NUL
 *          answer: pid, and a pidfd
 *   EXIT   pid, start_time
 *          answer: status as of wait(2), time_ns (CLOCK_REALTIME)
 *   NOTE   pid, start_time, status: stores how a process ended, before its parent reaps it
 *
 * PUT, DROP and NOTE with a count other than 0 are answered only when they fail; a DROP without an
 * entry does not fail then. They are carried out even if the sender is killed or does not wait.
 * Requests of an older connection are carried out before a newer connection is answered.
 *
 * `start_time` is field 22 of /proc/PID/stat. A request of another version is answered with EPROTO
 * and this version, an unknown call with ENOSYS. A client that sends invalid packets, or does not
 * read, loses its own connection at most: the keeper waits for no client.
 *
 * No memory is allocated after the start: all tables are static, and a page of them takes memory
 * once it was written. */
#include "call.h"

enum {
	VERSION = 1,
	MESSAGE_LIMIT = 128 * 1024, /* below the default send buffer of a socket */
	NAME_LIMIT = 128,
	STORE_BYTES = 8 * 1024 * 1024, /* names and data of all entries */
	ENTRIES = 8192,
	ENTRY_FDS = 32,
	RECORDS = 4096,
	CONNECTIONS = 512,
	SPARE_FDS = CONNECTIONS + 64 + 253, /* for connections and the descriptors of a message */
	STRINGS = 4096,
	IDLE_MS = 5000,
	TURN = 16, /* messages of one connection before the next one's */
	DEAF_MS = 100, /* without a descriptor for a new connection */
};

enum { HELLO = 1, PUT, GET, DROP, LIST, START, EXIT, NOTE };

struct message {
	u16 version, call;
	u32 name_size;
	i32 error, pid, status;
	u32 count;
	u64 start_time, time_ns;
};

/* ---- constants and structures of the kernel, the same on both architectures ---- */

enum { ENOENT = 2, EINTR = 4, ECHILD = 10, EAGAIN = 11, EINVAL = 22, EMFILE = 24, ENOSPC = 28 };
enum { ENOSYS = 38, EPROTO = 71, EMSGSIZE = 90 };
enum { SIGTERM = 15, SIGCHLD = 17, SIGNALS = 64, SIG_SETMASK = 2 };
enum { AF_UNIX = 1, SOCK_SEQPACKET = 5, SOCK_NONBLOCK = 04000, SOCK_CLOEXEC = 02000000 };
enum { SOL_SOCKET = 1, SO_PEERCRED = 17, SCM_RIGHTS = 1 };
enum { MSG_CTRUNC = 8, MSG_TRUNC = 0x20, MSG_DONTWAIT = 0x40, MSG_NOSIGNAL = 0x4000 };
enum { MSG_CMSG_CLOEXEC = 0x40000000 };
enum { O_RDONLY = 0, O_WRONLY = 1, O_RDWR = 2, O_CREAT = 0100, O_CLOEXEC = 02000000 };
enum { F_DUPFD_CLOEXEC = 1030, LOCK_EX = 2, LOCK_NB = 4 };
enum { POLLIN = 1, POLLERR = 8, POLLHUP = 16 };
enum { P_ALL = 0, WNOHANG = 1, WEXITED = 4, WNOWAIT = 0x01000000, CLD_EXITED = 1, CLD_DUMPED = 3 };
enum { PR_SET_NAME = 15, PR_SET_CHILD_SUBREAPER = 36, RLIMIT_NOFILE = 7, CLONE_PIDFD = 0x1000 };
enum { AT_FDCWD = -100, AT_EMPTY_PATH = 0x1000, STATX_NLINK = 4 };

struct poll {
	i32 fd;
	u16 events, ready;
};

struct piece {
	void *start;
	u64 size;
};

struct packet { /* struct msghdr */
	void *address;
	u32 address_size;
	struct piece *pieces;
	u64 piece_count;
	void *control;
	u64 control_size;
	i32 flags;
};

struct control { /* struct cmsghdr */
	u64 size;
	i32 level, type;
	i32 fds[];
};

enum { MOST_FDS = 253, CONTROL_BYTES = sizeof(struct control) + (MOST_FDS * 4 + 7) / 8 * 8 };

/* ---- the tables ---- */

struct entry {
	u32 at, name_size, data_size, fd_count; /* name and data lie one after the other at `at` */
	i32 fds[ENTRY_FDS];
};

struct record {
	u64 start_time, time_ns;
	i32 pid, status;
};

static struct entry entries[ENTRIES];
static u8 bytes[STORE_BYTES];
static u32 entry_count, bytes_used, fds_stored, fd_limit;

static struct record records[RECORDS]; /* a ring */
static u64 recorded;

static struct poll polled[2 + CONNECTIONS]; /* signals, the listener, connections */
static u64 last_used[2 + CONNECTIONS], turn;
static u32 connections;
static int deaf;

static u8 incoming[MESSAGE_LIMIT + 1] __attribute__((aligned(16)));
static u8 outgoing[MESSAGE_LIMIT] __attribute__((aligned(16)));
static u8 control[CONTROL_BYTES] __attribute__((aligned(16)));
static char *strings[STRINGS + 2];

/* ---- helpers ---- */

typedef u64 __attribute__((may_alias, aligned(1))) word;

/* The ranges may overlap if `to` is the lower one. */
static void copy(u8 *to, const u8 *from, u64 size)
{
	u64 i = 0;

	if (to >= from + size || to + sizeof(word) <= from)
		for (; i + sizeof(word) <= size; i += sizeof(word))
			*(word *)(to + i) = *(const word *)(from + i);
	for (; i < size; i++)
		to[i] = from[i];
}

#ifndef HOSTED
/* The compiler calls it for initial values. */
void *memset(void *start, int byte, unsigned long size);
void *memset(void *start, int byte, unsigned long size)
{
	for (u64 i = 0; i < size; i++)
		((u8 *)start)[i] = (u8)byte;
	return start;
}
#endif

static int equal(const u8 *one, const u8 *other, u64 size)
{
	for (u64 i = 0; i < size; i++)
		if (one[i] != other[i])
			return 0;
	return 1;
}

static i64 close(i32 fd)
{
	return call(NR_CLOSE, fd, 0, 0, 0, 0, 0);
}

static void close_all(const i32 *fds, u32 count)
{
	for (u32 i = 0; i < count; i++)
		close(fds[i]);
}

static i64 open(const char *path, u64 flags, u64 mode)
{
	return call(NR_OPENAT, AT_FDCWD, (u64)path, flags | O_CLOEXEC, mode, 0, 0);
}

/* Writes the digits before `end`; returns the first. */
static char *number(char *end, u64 value)
{
	do
		*--end = (char)('0' + value % 10);
	while (value /= 10);
	return end;
}

static u64 now_ns(void)
{
	i64 time[2] = { 0, 0 };

	call(NR_CLOCK_GETTIME, 0, (u64)time, 0, 0, 0, 0);
	return (u64)time[0] * 1000000000 + (u64)time[1];
}

/* ---- how orphans ended ---- */

static u64 start_time_of(i32 pid)
{
	static u8 text[1024];
	char path[32] = "/proc/", digits[12], *first = number(digits + sizeof digits, (u64)pid);
	u64 length = (u64)(digits + sizeof digits - first), at, value = 0;

	copy((u8 *)path + 6, (u8 *)first, length);
	copy((u8 *)path + 6 + length, (const u8 *)"/stat", 6);
	i64 fd = open(path, O_RDONLY, 0);
	if (fd < 0)
		return 0;
	i64 size = call(NR_READ, (u64)fd, (u64)text, sizeof text, 0, 0, 0);
	close((i32)fd);
	if (size <= 0)
		return 0;
	/* From the end, because the name may have blanks and parentheses. */
	for (at = (u64)size; at && text[at - 1] != ')'; at--)
		;
	for (u32 field = 2; at < (u64)size && field < 22; at++)
		field += text[at] == ' ';
	for (; at < (u64)size && text[at] >= '0' && text[at] <= '9'; at++)
		value = value * 10 + (u64)(text[at] - '0');
	return value;
}

static void add_record(i32 pid, u64 start_time, i32 status)
{
	struct record *record = records + recorded++ % RECORDS;

	record->pid = pid;
	record->start_time = start_time;
	record->status = status;
	record->time_ns = now_ns();
}

static const struct record *find_record(i32 pid, u64 start_time)
{
	u64 oldest = recorded > RECORDS ? recorded - RECORDS : 0;

	for (u64 i = recorded; i > oldest; i--) {
		const struct record *record = records + (i - 1) % RECORDS;
		if (record->pid == pid && record->start_time == start_time)
			return record;
	}
	return 0;
}

/* Reaps children that have ended. Stores how a child ended before it reaps the zombie, so that a
 * client that does not find the process gets its status here. Returns the last result of waitid(2):
 * 0 while there are children, else -ECHILD. Stops after 256 children and returns 1, so that
 * connections have their turn. */
static i64 reap(void)
{
	for (u32 i = 0; i < 256; i++) {
		i32 info[32] = { 0 }; /* siginfo_t: si_code at 2, si_pid at 4, si_status at 6 */
		i64 result = call(NR_WAITID, P_ALL, 0, (u64)info, WEXITED | WNOHANG | WNOWAIT, 0,
				  0);
		i32 pid = info[4];
		if (result < 0 || !pid)
			return result;
		i32 core = info[2] == CLD_DUMPED ? 0x80 : 0;
		i32 status = info[2] == CLD_EXITED ? (info[6] & 0xff) << 8
						   : (info[6] & 0x7f) | core;
		add_record(pid, start_time_of(pid), status);
		call(NR_WAIT4, (u64)pid, 0, WNOHANG, 0, 0, 0);
	}
	return 1;
}

/* ---- the store ---- */

static struct entry *find_entry(const u8 *name, u32 size)
{
	for (u32 i = 0; i < entry_count; i++)
		if (entries[i].name_size == size && equal(bytes + entries[i].at, name, size))
			return entries + i;
	return 0;
}

static void remove_entry(struct entry *entry)
{
	u32 at = entry->at, size = entry->name_size + entry->data_size;

	close_all(entry->fds, entry->fd_count);
	fds_stored -= entry->fd_count;
	copy(bytes + at, bytes + at + size, bytes_used - at - size);
	bytes_used -= size;
	entry_count--;
	copy((u8 *)entry, (u8 *)(entries + entry_count), sizeof *entry);
	for (u32 i = 0; i < entry_count; i++)
		if (entries[i].at > at)
			entries[i].at -= size;
}

static int is_name(const u8 *name, u32 size)
{
	for (u32 i = 0; i < size; i++) {
		u8 c = name[i], lower = c | 0x20;
		int letter = lower >= 'a' && lower <= 'z', digit = c >= '0' && c <= '9';
		if (!letter && !digit && c != '.' && c != '_' && c != '-' && c != ':' && c != '/')
			return 0;
	}
	return 1;
}

/* The descriptors belong to the entry, unless an error is returned. */
static i32 put(const u8 *name, u32 name_size, u32 data_size, const i32 *fds, u32 fd_count)
{
	struct entry *old = find_entry(name, name_size);
	u32 size = name_size + data_size, old_size = old ? old->name_size + old->data_size : 0;

	if (!name_size || fd_count > ENTRY_FDS)
		return EINVAL;
	if (bytes_used - old_size + size > STORE_BYTES || (!old && entry_count == ENTRIES))
		return ENOSPC;
	if (fds_stored - (old ? old->fd_count : 0) + fd_count > fd_limit)
		return EMFILE;
	if (old)
		remove_entry(old);
	struct entry *entry = entries + entry_count++;
	entry->at = bytes_used;
	entry->name_size = name_size;
	entry->data_size = data_size;
	entry->fd_count = fd_count;
	copy((u8 *)entry->fds, (const u8 *)fds, fd_count * sizeof *fds);
	copy(bytes + bytes_used, name, size); /* the data follows the name in the message, too */
	bytes_used += size;
	fds_stored += fd_count;
	return 0;
}

/* Writes names into `outgoing`; returns their length. `passed`: how many entries to skip; gets the
 * number for the next request, 0 at the end. */
static u32 list(const u8 *prefix, u32 size, u32 *passed)
{
	u32 length = 0;

	for (u32 i = *passed; i < entry_count; i++) {
		const struct entry *entry = entries + i;
		if (entry->name_size < size || !equal(bytes + entry->at, prefix, size))
			continue;
		if (sizeof(struct message) + length + entry->name_size + 1 > MESSAGE_LIMIT) {
			*passed = i;
			return length;
		}
		u8 *to = outgoing + sizeof(struct message) + length;
		copy(to, bytes + entry->at, entry->name_size);
		to[entry->name_size] = 0;
		length += entry->name_size + 1;
	}
	*passed = 0;
	return length;
}

/* ---- commands that are started here, so that their orphans become ours ---- */

static u32 number_at(const u8 *numbers, u32 index)
{
	u32 value;

	copy((u8 *)&value, numbers + 4 * index, sizeof value);
	return value;
}

static void __attribute__((noreturn)) execute(const u8 *numbers, const i32 *fds, u32 fd_count,
					      char **arguments, char **environment)
{
	i32 copies[ENTRY_FDS];
	u64 highest = 2, none = 0;

	call(NR_SETSID, 0, 0, 0, 0, 0, 0);
	call(NR_CHDIR, (u64)"/", 0, 0, 0, 0, 0);
	for (u32 i = 0; i < fd_count; i++)
		highest = number_at(numbers, i) > highest ? number_at(numbers, i) : highest;
	for (u32 i = 0; i < fd_count; i++)
		copies[i] = (i32)call(NR_FCNTL, (u64)fds[i], F_DUPFD_CLOEXEC, highest + 1, 0, 0, 0);
	for (u32 i = 0; i < fd_count; i++)
		if (copies[i] < 0 ||
		    call(NR_DUP3, (u64)copies[i], number_at(numbers, i), 0, 0, 0, 0) < 0)
			leave(127);
	call(NR_SIGPROCMASK, SIG_SETMASK, (u64)&none, 0, sizeof none, 0, 0);
	call(NR_EXECVE, (u64)arguments[0], (u64)arguments, (u64)environment, 0, 0, 0);
	leave(127);
}

/* Returns the pid, or an errno as a negative number; `pidfd` is the caller's to close. */
static i64 start(u8 *data, u32 size, u32 argument_count, const i32 *fds, u32 fd_count,
		 i32 *pidfd)
{
	u32 at = 4 * fd_count, count = 0;

	if (fd_count > ENTRY_FDS || at > size || !argument_count)
		return -EINVAL;
	if (size > at && data[size - 1])
		return -EINVAL;
	for (u32 i = 0; i < fd_count; i++)
		if (number_at(data, i) >= 1024)
			return -EINVAL;
	while (at < size) {
		/* Arguments, a null pointer, the environment, a null pointer. */
		if (count == argument_count)
			strings[count++] = 0;
		if (count >= STRINGS)
			return -EINVAL;
		strings[count++] = (char *)data + at;
		while (data[at++])
			;
	}
	if (count < argument_count)
		return -EINVAL;
	if (count == argument_count)
		strings[count++] = 0;
	strings[count] = 0;
	/* A fork, so that an executable on storage that does not answer stops only the child. */
	i64 pid = call(NR_CLONE, CLONE_PIDFD | SIGCHLD, 0, (u64)pidfd, 0, 0, 0);
	if (!pid)
		execute(data, fds, fd_count, strings, strings + argument_count + 1);
	return pid;
}

/* ---- connections ---- */

static void drop_connection(u32 index)
{
	close(polled[index].fd);
	connections--;
	for (u32 i = index; i < 2 + connections; i++) { /* stay ordered by age */
		polled[i] = polled[i + 1];
		last_used[i] = last_used[i + 1];
	}
}

/* Makes room for a connection: an idle client connects again when it needs the keeper. */
static void drop_oldest(void)
{
	u32 oldest = 2;

	for (u32 i = 3; i < 2 + connections; i++)
		if (last_used[i] < last_used[oldest])
			oldest = i;
	if (connections)
		drop_connection(oldest);
}

static void accept(void)
{
	for (u32 i = 0; i < 16; i++) {
		i64 fd = call(NR_ACCEPT4, (u64)polled[1].fd, 0, 0, SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
			      0);
		if (fd < 0) {
			/* Without a free descriptor the listener would stay ready for ever. */
			deaf = fd != -EAGAIN;
			if (fd == -EMFILE)
				drop_oldest();
			return;
		}
		u32 credentials[3] = { 0, ~0U, 0 }, size = sizeof credentials; /* pid, uid, gid */
		i64 result = call(NR_GETSOCKOPT, (u64)fd, SOL_SOCKET, SO_PEERCRED,
				  (u64)credentials, (u64)&size, 0);
		if (result < 0 || credentials[1]) {
			close((i32)fd);
			continue;
		}
		if (connections == CONNECTIONS)
			drop_oldest();
		polled[2 + connections] = (struct poll){ (i32)fd, POLLIN, 0 };
		last_used[2 + connections++] = ++turn;
	}
}

/* Points `fds` to the descriptors of the packet in `control`; returns how many there are. */
static u32 received_fds(const struct packet *packet, const i32 **fds)
{
	const struct control *first = (const struct control *)control;

	*fds = first->fds;
	if (packet->control_size < sizeof *first || first->size < sizeof *first)
		return 0;
	if (first->level != SOL_SOCKET || first->type != SCM_RIGHTS)
		return 0;
	/* The kernel sends all in one control message, MOST_FDS at most. */
	return (u32)((first->size - sizeof *first) / 4);
}

/* Sends `outgoing`; returns false when the client does not take it, which ends its connection. */
static int answer(i32 fd, u32 data_size, const i32 *fds, u32 fd_count)
{
	struct piece piece = { outgoing, sizeof(struct message) + data_size };
	struct packet packet = { 0, 0, &piece, 1, 0, 0, 0 };
	static u8 sent[sizeof(struct control) + ENTRY_FDS * 4] __attribute__((aligned(16)));

	if (fd_count) {
		struct control *rights = (struct control *)sent;
		rights->size = sizeof *rights + fd_count * 4;
		rights->level = SOL_SOCKET;
		rights->type = SCM_RIGHTS;
		copy((u8 *)rights->fds, (const u8 *)fds, fd_count * 4);
		packet.control = sent;
		packet.control_size = (rights->size + 7) / 8 * 8;
	}
	return call(NR_SENDMSG, (u64)fd, (u64)&packet, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0) >= 0;
}

/* Carries out a request; returns false when its connection has to end. Stores or closes `fds`. */
static int serve(i32 client, u32 size, const i32 *fds, u32 fd_count, i32 error)
{
	struct message *request = (struct message *)incoming, *reply = (struct message *)outgoing;
	u8 *name = incoming + sizeof *request;
	u32 name_size, data_size, answered = 0, copied = 0;
	const i32 *copies = 0;
	int quiet = 0;
	const struct record *record;
	struct entry *entry = 0;
	i32 pidfd = -1;
	i64 pid;

	*reply = (struct message){ .version = VERSION };
	if (size < sizeof *request) {
		close_all(fds, fd_count);
		return 0;
	}
	reply->call = request->call;
	name_size = request->name_size;
	data_size = size - (u32)sizeof *request - name_size;
	if (!error && request->version != VERSION)
		error = EPROTO;
	if (!error && (name_size > NAME_LIMIT || name_size > size - sizeof *request ||
		       !is_name(name, name_size)))
		error = EINVAL;
	if (request->call == PUT || request->call == DROP || request->call == NOTE)
		quiet = request->count != 0;
	if (error)
		goto done;
	if (request->call == GET || request->call == DROP) {
		entry = find_entry(name, name_size);
		error = entry ? 0 : ENOENT;
	}
	switch (request->call) {
	case HELLO:
		reply->pid = (i32)call(NR_GETPID, 0, 0, 0, 0, 0, 0);
		reply->count = entry_count;
		break;
	case PUT:
		error = put(name, name_size, data_size, fds, fd_count);
		fd_count = error ? fd_count : 0;
		break;
	case GET:
		if (!entry)
			break;
		answered = entry->data_size;
		copy(outgoing + sizeof *reply, bytes + entry->at + entry->name_size, answered);
		copies = entry->fds;
		copied = entry->fd_count;
		break;
	case DROP:
		if (entry)
			remove_entry(entry);
		error = quiet ? 0 : error;
		break;
	case LIST:
		reply->count = request->count;
		answered = list(name, name_size, &reply->count);
		break;
	case START:
		pid = start(name + name_size, data_size, request->count, fds, fd_count, &pidfd);
		error = pid < 0 ? (i32)-pid : 0;
		reply->pid = pid < 0 ? 0 : (i32)pid;
		copies = &pidfd;
		copied = pid > 0;
		break;
	case EXIT:
		record = find_record(request->pid, request->start_time);
		if (record) {
			reply->status = record->status;
			reply->time_ns = record->time_ns;
		}
		error = record ? 0 : ENOENT;
		break;
	case NOTE:
		if (!find_record(request->pid, request->start_time))
			add_record(request->pid, request->start_time, request->status);
		break;
	default:
		error = ENOSYS;
	}
done:
	reply->error = error;
	close_all(fds, fd_count);
	if (quiet && !error)
		return 1;
	int whole = answer(client, error ? 0 : answered, copies, error ? 0 : copied);
	if (pidfd >= 0)
		close(pidfd);
	return whole;
}

enum { GONE, EMPTY, SERVED };

/* Receives and serves one message of a connection. */
static int receive(i32 client)
{
	struct piece piece = { incoming, sizeof incoming };
	struct packet packet = { 0, 0, &piece, 1, control, sizeof control, 0 };
	const i32 *fds;
	i64 size = call(NR_RECVMSG, (u64)client, (u64)&packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, 0,
			0, 0);

	if (size == -EAGAIN || size == -EINTR)
		return EMPTY;
	if (size < 0)
		return GONE;
	u32 fd_count = received_fds(&packet, &fds);
	if (!size) {
		close_all(fds, fd_count);
		return GONE;
	}
	i32 error = packet.flags & MSG_CTRUNC ? EMFILE : 0;
	if (packet.flags & MSG_TRUNC || size > MESSAGE_LIMIT)
		error = EMSGSIZE;
	return serve(client, (u32)size, fds, fd_count, error) ? SERVED : GONE;
}

/* Serves some messages of each connection, so that none waits long for the others; oldest first. */
static void serve_all(void)
{
	for (u32 i = 2; i < 2 + connections;) {
		int state = EMPTY;
		if (polled[i].ready) {
			last_used[i] = ++turn;
			for (u32 count = 0; count < TURN; count++)
				if ((state = receive(polled[i].fd)) != SERVED)
					break;
		}
		if (state == GONE)
			drop_connection(i);
		else
			i++;
	}
}

/* ---- start and loop ---- */

static void become_quiet(void)
{
	u64 all = ~0UL, default_action[4] = { 0, 0, 0, 0 };

	call(NR_CLOSE_RANGE, 3, ~0U, 0, 0, 0, 0);
	for (u64 signal = 1; signal <= SIGNALS; signal++)
		call(NR_SIGACTION, signal, (u64)default_action, 0, sizeof all, 0, 0);
	/* Blocked, not ignored: `execute` unblocks them, and an ignored signal would stay ignored
	 * in the programs that are started here. Only SIGCHLD and SIGTERM are read. */
	call(NR_SIGPROCMASK, SIG_SETMASK, (u64)&all, 0, sizeof all, 0, 0);
}

/* Raises the limit of descriptors as far as permitted; the store may use all but SPARE_FDS. */
static void raise_limit(void)
{
	u64 limit[2] = { 1024, 1024 };

	call(NR_PRLIMIT64, 0, RLIMIT_NOFILE, 0, (u64)limit, 0, 0);
	limit[0] = limit[1];
	call(NR_PRLIMIT64, 0, RLIMIT_NOFILE, (u64)limit, 0, 0, 0);
	fd_limit = limit[0] > 65536 ? 65536 : (u32)limit[0];
	fd_limit = fd_limit > SPARE_FDS ? fd_limit - SPARE_FDS : fd_limit / 2;
}

static i32 take_lock(void)
{
	i64 lock = open("keeper.lock", O_RDWR | O_CREAT, 0600);

	if (lock < 0)
		leave(2);
	if (call(NR_FLOCK, (u64)lock, LOCK_EX | LOCK_NB, 0, 0, 0, 0) < 0)
		leave(3);
	return (i32)lock;
}

static i32 listen(void)
{
	struct {
		u16 family;
		char path[12];
	} address = { AF_UNIX, "keeper.sock" };
	u64 type = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;
	i64 fd = call(NR_SOCKET, AF_UNIX, type, 0, 0, 0, 0);

	/* A socket of this name is a dead keeper's, because the lock is ours. */
	call(NR_UNLINKAT, AT_FDCWD, (u64)address.path, 0, 0, 0, 0);
	call(NR_UMASK, 0177, 0, 0, 0, 0, 0);
	if (fd < 0 || call(NR_BIND, (u64)fd, (u64)&address, sizeof address, 0, 0, 0) < 0)
		leave(2);
	if (call(NR_LISTEN, (u64)fd, 128, 0, 0, 0, 0) < 0)
		leave(2);
	call(NR_UMASK, 022, 0, 0, 0, 0, 0);
	return (i32)fd;
}

static void write_pid(i32 lock, i64 pid)
{
	char text[16], *end = text + sizeof text - 1, *first = number(end, (u64)pid);

	*end = '\n';
	call(NR_FTRUNCATE, (u64)lock, 0, 0, 0, 0, 0);
	call(NR_PWRITE64, (u64)lock, (u64)first, (u64)(end + 1 - first), 0, 0, 0);
}

static void use_null_as_stdio(void)
{
	i64 null = open("/dev/null", O_RDWR, 0);

	for (u64 fd = 0; null >= 0 && fd < 3; fd++)
		call(NR_DUP3, (u64)null, fd, 0, 0, 0, 0);
	if (null > 2)
		close((i32)null);
}

/* Protects the keeper from the OOM killer, where that is permitted: killing it frees little memory,
 * and it has the descriptors of all pods. */
static void lower_oom_score(void)
{
	i64 fd = open("/proc/self/oom_score_adj", O_WRONLY, 0);

	if (fd >= 0) {
		call(NR_WRITE, (u64)fd, (u64)"-999", 4, 0, 0, 0);
		close((i32)fd);
	}
}

static void __attribute__((noreturn)) end(void)
{
	/* The folder is still the working directory, so its file system is still mounted. */
	call(NR_UNLINKAT, AT_FDCWD, (u64)"keeper.sock", 0, 0, 0, 0);
	leave(0);
}

static int is_deleted(i32 lock)
{
	struct {
		u32 mask, block_size;
		u64 attributes;
		u32 links;
		u8 rest[236];
	} status = { .links = 1 }; /* struct statx, linux/stat.h */

	i64 result = call(NR_STATX, (u64)lock, (u64)"", AT_EMPTY_PATH, STATX_NLINK, (u64)&status,
			  0);
	return !result && !status.links;
}

static void __attribute__((noreturn)) serve_clients(i32 lock)
{
	i64 pause[2];

	for (;;) {
		i64 children = reap(); /* also before the first wait */
		int idle = !connections && !entry_count && children == -ECHILD;
		i64 wait_ms = children > 0 ? 0 : deaf ? DEAF_MS : IDLE_MS;
		pause[0] = wait_ms / 1000;
		pause[1] = wait_ms % 1000 * 1000000;
		polled[1].events = deaf ? 0 : POLLIN;
		u64 limit = !connections || wait_ms != IDLE_MS ? (u64)pause : 0;
		i64 ready = call(NR_PPOLL, (u64)polled, 2 + connections, limit, 0, 0, 0);
		if (!ready && idle && !deaf)
			end();
		if (!ready && !connections && is_deleted(lock))
			leave(0); /* a socket of this name is another keeper's */
		deaf = 0;
		if (ready <= 0)
			continue;
		if (polled[0].ready) {
			u32 signals[32]; /* struct signalfd_siginfo: 128 bytes, the number first */
			while (call(NR_READ, (u64)polled[0].fd, (u64)signals, sizeof signals, 0, 0,
				    0) == sizeof signals)
				if (signals[0] == SIGTERM)
					end();
		}
		serve_all();
		if (polled[1].ready)
			accept();
	}
}

static void __attribute__((used, noreturn)) start_keeper(const u64 *stack)
{
	char **arguments = (char **)(stack + 1);
	u64 awaited = 1UL << (SIGCHLD - 1) | 1UL << (SIGTERM - 1);

	become_quiet();
	if (stack[0] != 2 || call(NR_CHDIR, (u64)arguments[1], 0, 0, 0, 0, 0) < 0)
		leave(2);
	i32 lock = take_lock();
	polled[1] = (struct poll){ listen(), POLLIN, 0 };
	i64 child = call(NR_CLONE, SIGCHLD, 0, 0, 0, 0, 0);
	if (child > 0)
		write_pid(lock, child);
	if (child)
		leave(child < 0 ? 2 : 0);
	call(NR_SETSID, 0, 0, 0, 0, 0, 0);
	call(NR_PRCTL, PR_SET_NAME, (u64)"pyrunc-keeper", 0, 0, 0, 0);
	call(NR_PRCTL, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0, 0);
	lower_oom_score();
	raise_limit();
	use_null_as_stdio();
	i64 signals = call(NR_SIGNALFD4, ~0UL, (u64)&awaited, sizeof awaited,
			   SOCK_CLOEXEC | SOCK_NONBLOCK, 0, 0);
	polled[0] = (struct poll){ (i32)signals, POLLIN, 0 };
	serve_clients(lock);
}

START_WITH(start_keeper);
