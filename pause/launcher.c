/* Runs a program of system calls and ends in execve. The program was compiled from a container's
 * plan by pyrunc/program; this file decides nothing. It runs one operation after the other; jumps
 * go only forward; it uses no allocation and no libc.
 *
 * Started as: launcher N. Descriptor N is the synchronisation socket (SOCK_SEQPACKET), N+1 the
 * program, laid out as in pyrunc/program/encode.py. The program is mapped privately, so results are
 * stored into its data. All of it is checked before the first call: no jump and no address in it
 * leads outside of it.
 *
 * A message to the parent is 24 bytes: tag, index of the operation, two numbers. Exit codes: 124
 * the parent is gone, 125 a call failed (and was reported), 126 the program was refused. */
#include "call.h"

/* Places in the data need not be aligned. */
typedef u64 __attribute__((may_alias, aligned(1))) word;
typedef i32 __attribute__((may_alias, aligned(1))) half;

enum { MAGIC = 0x4e525950, VERSION = 1, ANY = 0xffff };
enum { SYS = 1, CMP, SET, SEND, WAIT, FAIL, EXIT };
enum { IMMEDIATE, ADDRESS, LOAD_1, LOAD_4, LOAD_8 };
enum { EQ, NE, LT, GE };
enum { CODE_ORPHANED = 124, CODE_FAILED, CODE_REFUSED };
#define TAG_FIRST_RESERVED 0xfffffff0u
#define TAG_REFUSED 0xfffffffeu
#define TAG_FAILURE 0xffffffffu
/* Reasons for refusing a program. */
enum {
	SHORT = 1, OTHER_VERSION, SIZES, KIND, ARGUMENT_KIND, PLACE, SKIP, RELOCATION, NO_END,
	UNMAPPED
};

struct header {
	u32 magic, version, operations, relocations, data, data_size, zero[2];
};

struct operation {
	u8 kind, width, relation, zero;
	u32 number;
	u16 errnos[3], retry;
	u32 place, kinds, skip, skips[3], times, zero2;
	u64 args[6];
};

struct message {
	u32 tag, index;
	i64 value, extra;
};

struct program {
	struct operation *operations;
	u32 *relocations;
	u8 *data;
	u32 size, relocation_count, data_size;
	i32 sync;
};

static i64 send_message(const struct program *p, u32 tag, u32 index, i64 value, i64 extra)
{
	struct message message = { tag, index, value, extra };

	/* write, not sendto, because a strict filter allows it */
	return call(NR_WRITE, (u64)p->sync, (u64)&message, sizeof message, 0, 0, 0);
}

static void __attribute__((noreturn)) refuse(const struct program *p, u32 index, i64 why)
{
	send_message(p, TAG_REFUSED, index, why, 0);
	leave(CODE_REFUSED);
}

/* ---- checking ---- */

static int inside(const struct program *p, u64 place, u64 width)
{
	return place <= p->data_size && width <= p->data_size - place;
}

static void check_argument(const struct program *p, u32 index, u32 kind, u64 value)
{
	static const u8 width[] = { [ADDRESS] = 0, [LOAD_1] = 1, [LOAD_4] = 4, [LOAD_8] = 8 };

	if (kind == IMMEDIATE)
		return;
	if (kind > LOAD_8)
		refuse(p, index, ARGUMENT_KIND);
	if (!inside(p, value, width[kind]))
		refuse(p, index, PLACE);
}

static void check_skip(const struct program *p, u32 index, u32 skip)
{
	/* index is below size, so nothing wraps */
	if (skip >= p->size - index - 1)
		refuse(p, index, SKIP);
}

static void check_operation(const struct program *p, u32 index)
{
	const struct operation *o = p->operations + index;

	if (o->kind < SYS || o->kind > EXIT || (o->kind == CMP && o->relation > GE) ||
	    (o->kind == SEND && (!o->number || o->number >= TAG_FIRST_RESERVED)))
		refuse(p, index, KIND);
	if (o->kinds >> 24)
		refuse(p, index, ARGUMENT_KIND);
	for (u32 i = 0; i < 6; i++)
		check_argument(p, index, o->kinds >> 4 * i & 15, o->args[i]);
	if (o->width != 0 && o->width != 1 && o->width != 4 && o->width != 8)
		refuse(p, index, PLACE);
	if (!inside(p, o->place, o->width) || (o->kind == SET && !o->width))
		refuse(p, index, PLACE);
	if (o->kind == FAIL || o->kind == EXIT)
		return;
	check_skip(p, index, o->skip);
	for (u32 i = 0; i < 3; i++)
		check_skip(p, index, o->skips[i]);
}

static void check_relocation(const struct program *p, u32 place)
{
	if (place % 8 || !inside(p, place, 8) || !inside(p, *(word *)(p->data + place), 0))
		refuse(p, 0, RELOCATION);
}

/* Maps the program, checks all of it, and turns the offsets at its relocations into pointers. */
static void load(struct program *p, u64 fd)
{
	const struct header *h;
	i64 length = call(NR_LSEEK, fd, 0, 2, 0, 0, 0);

	if (length < (i64)(sizeof *h + sizeof *p->operations))
		refuse(p, 0, SHORT);
	i64 base = call(NR_MMAP, 0, (u64)length, 3 /* read, write */, 2 /* private */, fd, 0);
	if (base < 0 && base > -4096)
		refuse(p, 0, UNMAPPED);
	call(NR_CLOSE, fd, 0, 0, 0, 0, 0);

	h = (const struct header *)base;
	if (h->magic != MAGIC)
		refuse(p, 0, SHORT);
	if (h->version != VERSION)
		refuse(p, 0, OTHER_VERSION);
	u64 table = sizeof *h + (u64)h->operations * sizeof *p->operations;
	if (!h->operations || table + (u64)h->relocations * 4 > h->data || h->data % 16 ||
	    h->data_size < 8 ||
	    (u64)h->data + h->data_size != (u64)length)
		refuse(p, 0, SIZES);
	p->size = h->operations;
	p->relocation_count = h->relocations;
	p->data_size = h->data_size;
	p->operations = (struct operation *)(h + 1);
	p->relocations = (u32 *)((u64)base + table);
	p->data = (u8 *)base + h->data;

	u8 last = p->operations[p->size - 1].kind;
	if (last != FAIL && last != EXIT)
		refuse(p, p->size - 1, NO_END);
	for (u32 i = 0; i < p->size; i++)
		check_operation(p, i);
	for (u32 i = 0; i < p->relocation_count; i++)
		check_relocation(p, p->relocations[i]);
	for (u32 i = 0; i < p->relocation_count; i++)
		*(word *)(p->data + p->relocations[i]) += (u64)p->data;
}

/* ---- running ---- */

/* The signal handler that a program may install, because the kernel drops signals that the first
 * process of a pid namespace does not handle. */
static void __attribute__((noreturn)) end_by_signal(i32 number)
{
	leave((u64)(128 + number));
}

static u64 value_of(const struct program *p, const struct operation *o, u32 i)
{
	u64 v = o->args[i];

	switch (o->kinds >> 4 * i & 15) {
	case ADDRESS:
		return (u64)p->data + v;
	case LOAD_1:
		return p->data[v];
	case LOAD_4:
		return (u64)(i64) * (half *)(p->data + v);
	case LOAD_8:
		return *(word *)(p->data + v);
	}
	return v;
}

static void store(const struct program *p, const struct operation *o, u64 value)
{
	u8 *place = p->data + o->place;

	if (o->width == 1)
		*place = (u8)value;
	else if (o->width == 4)
		*(half *)place = (i32)value;
	else if (o->width == 8)
		*(word *)place = value;
}

static int compare(u8 relation, i64 value, i64 constant)
{
	switch (relation) {
	case EQ:
		return value == constant;
	case NE:
		return value != constant;
	case LT:
		return value < constant;
	}
	return value >= constant;
}

/* Makes one system call; returns how many operations to skip. An error without a rule ends the
 * program. */
static u32 system_call(const struct program *p, const struct operation *o, const u64 *a)
{
	u32 times = o->times;
	i64 result;

	do
		result = call(o->number, a[0], a[1], a[2], a[3], a[4], a[5]);
	while (o->retry && result == -(i64)o->retry && times--);
	store(p, o, (u64)result);
	if (result >= 0 || result < -4095)
		return o->skip;
	for (u32 i = 0; i < 3; i++)
		if (o->errnos[i] && (o->errnos[i] == ANY || result == -(i64)o->errnos[i]))
			return o->skips[i];
	send_message(p, TAG_FAILURE, (u32)(o - p->operations), -result, 0);
	leave(CODE_FAILED);
}

static void __attribute__((noreturn)) run(const struct program *p)
{
	for (u32 i = 0;; i++) {
		const struct operation *o = p->operations + i;
		u64 a[6];
		u8 byte;

		for (u32 k = 0; k < 6; k++)
			a[k] = value_of(p, o, k);
		switch (o->kind) {
		case SYS:
			i += system_call(p, o, a);
			break;
		case CMP:
			i += compare(o->relation, (i64)(a[0] & a[1]), (i64)a[2]) ? o->skip
									       : o->skips[0];
			break;
		case SET:
			store(p, o, a[0]);
			break;
		case SEND:
			if (send_message(p, o->number, i, (i64)a[0], (i64)a[1]) < 0)
				leave(CODE_ORPHANED);
			break;
		case WAIT:
			if (call(NR_READ, (u64)p->sync, (u64)&byte, 1, 0, 0, 0) != 1)
				leave(CODE_ORPHANED);
			store(p, o, byte);
			break;
		case FAIL:
			send_message(p, TAG_FAILURE, i, (i64)a[0], 0);
			leave(CODE_FAILED);
		case EXIT:
			leave(a[0]);
		}
	}
}

/* stack: argc, then argv, as the kernel left them */
void __attribute__((used, noreturn)) launch(const u64 *stack)
{
	struct program p;
	const char *digit = stack[0] > 1 ? (const char *)stack[2] : "";

	if (!*digit)
		leave(CODE_REFUSED);
	for (p.sync = 0; *digit; digit++) {
		if (*digit < '0' || *digit > '9' || p.sync > 100000000)
			leave(CODE_REFUSED);
		p.sync = p.sync * 10 + *digit - '0';
	}
	load(&p, (u64)p.sync + 1);
	*(half *)p.data = p.sync;
	*(half *)(p.data + 4) = (i32)(u64)end_by_signal; /* linked below 2 GiB */
	run(&p);
}

START_WITH(launch);
