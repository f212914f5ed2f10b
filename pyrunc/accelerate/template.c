/* The memory of a zygote as a file that its forks map privately, and what gives pages of a fork back to that file.
 *
 * Python writes a reference count wherever it looks, and so a fork soon has a copy of most pages. Of these many say what the zygote's
 * say, or differ in nothing but counts that mean nothing any more. template_give_back finds them and lets them go: the next access
 * finds the zygote's page again. All here runs while nothing else of the process does: one thread, signals blocked.
 */
#include "../../pause/call.h"

#if defined(__x86_64__)
enum { NR_MUNMAP = 11, NR_PREAD64 = 17, NR_MINCORE = 27, NR_MADVISE = 28 };
#elif defined(__aarch64__)
enum { NR_PREAD64 = 67, NR_MUNMAP = 215, NR_MINCORE = 232, NR_MADVISE = 233 };
#endif

enum {
	PAGE = 4096,
	UNIT = 2, /* bytes for which there is one bit in the mask, as in an instruction of CPython or a counter beside it */
	MASK = PAGE / UNIT / 8,
	WORDS = PAGE / 8,
	PER_READ = 64,
	THREAD = 2 * PAGE, /* on either side of the thread pointer: glibc's thread block, into which the kernel writes (rseq) */
	SIG_SETMASK = 2,
	PROT_READ_WRITE = 3,
	MAP_SHARED = 1,
	MAP_PRIVATE = 2,
	MAP_FIXED = 16,
	MADV_DONTNEED = 4,
	MADV_POPULATE_READ = 22,
};

#define LASTING (1UL << 40)  /* more references than a fork will ever drop */
#define PRESENT (1UL << 63)  /* pagemap, admin-guide/mm/pagemap.rst */
#define OF_A_FILE (1UL << 61) /* not copied yet */
#define OURS_ALONE (1UL << 56)
#define COPIED(entry) (((entry) & (PRESENT | OF_A_FILE | OURS_ALONE)) == (PRESENT | OURS_ALONE))

struct range {
	u64 start, length;
	u64 offset; /* of its first byte in the file */
};

struct code {
	u64 start;	    /* of its instructions in memory */
	const u8 *original; /* the same before they were specialised: this says where an instruction begins */
	u64 length;
};

static i64 set_signals(u64 blocked, u64 *before)
{
	return call(NR_SIGPROCMASK, SIG_SETMASK, (u64)&blocked, (u64)before, 8, 0, 0);
}

static int is_zero(const u64 *page)
{
	for (int i = 0; i < WORDS; i++)
		if (page[i])
			return 0;
	return 1;
}

static void ignore(u8 *masks, const struct range *ranges, u64 count, u64 address, u64 bytes)
{
	for (u64 i = 0; i < count; i++) {
		if (address - ranges[i].start >= ranges[i].length)
			continue;
		u64 bit = (address - ranges[i].start + ranges[i].offset) / UNIT;
		for (u64 end = bit + bytes / UNIT; bit < end; bit++)
			masks[bit / 8] |= (u8)(1 << bit % 8);
		return;
	}
}

/* Each of `objects` gets more references than it can lose, and from here on nobody asks how many it has. Of an instruction with a
 * cache (`caches`: how many units one has) the first unit behind it counts how often it is still to be tried. */
i64 template_ignore(i32 fd, u64 masks_at, u64 masks_size, const struct range *ranges, u64 count, u64 **objects, u64 made,
		    const struct code *codes, u64 functions, const u8 *caches)
{
	i64 mapped = call(NR_MMAP, 0, masks_size, PROT_READ_WRITE, MAP_SHARED, (u64)fd, masks_at);
	if (mapped < 0 && mapped > -PAGE)
		return mapped;
	u8 *masks = (u8 *)mapped;
	for (u64 i = 0; i < made; i++) {
		*objects[i] += LASTING;
		ignore(masks, ranges, count, (u64)objects[i], 8);
	}
	for (u64 i = 0; i < functions; i++)
		for (u64 at = 0; at < codes[i].length;) {
			u64 units = caches[codes[i].original[at]];
			if (units)
				ignore(masks, ranges, count, codes[i].start + at + UNIT, UNIT);
			at += UNIT + units * UNIT;
		}
	return call(NR_MUNMAP, (u64)masks, masks_size, 0, 0, 0, 0);
}

/* How much of a range is there still: malloc(3) may have given its end back to the kernel since it was listed. */
static u64 still_there(struct range range)
{
	u64 at = 0;
	u8 resident;

	while (at < range.length && !call(NR_MINCORE, range.start + at, PAGE, (u64)&resident, 0, 0, 0))
		at += PAGE;
	return at;
}

/* One range's content goes to the file, and a private mapping of it takes its place. */
static i64 make(i32 fd, struct range range)
{
	for (u64 at = 0; at < range.length; at += PAGE) {
		if (is_zero((const u64 *)(range.start + at)))
			continue; /* a hole */
		i64 written = call(NR_PWRITE64, (u64)fd, range.start + at, PAGE, range.offset + at, 0, 0);
		if (written != PAGE)
			return written < 0 ? written : -1;
	}
	i64 mapped = call(NR_MMAP, range.start, range.length, PROT_READ_WRITE, MAP_PRIVATE | MAP_FIXED, (u64)fd, range.offset);
	if (mapped != (i64)range.start)
		return mapped;
	call(NR_MADVISE, range.start, range.length, MADV_POPULATE_READ, 0, 0, 0); /* else each fork has to */
	return 0;
}

/* Make them all, as far as they are there still, which is their length afterwards; 0 of one that could not be made. Returns -errno of
 * the last of those. */
i64 template_make(i32 fd, struct range *ranges, u64 count)
{
	u64 before;
	i64 failed = set_signals(~0UL, &before), last = failed;
	for (u64 i = 0; i < count && !failed; i++) {
		ranges[i].length = still_there(ranges[i]);
		i64 outcome = ranges[i].length ? make(fd, ranges[i]) : 0;
		if (outcome) {
			ranges[i].length = 0;
			last = outcome;
		}
	}
	set_signals(before, 0);
	return last;
}

/* Whether two pages are the same where the mask says nothing. */
static int is_same(const u64 *page, const u64 *template, const u8 *mask)
{
	static const u64 units[16] = {
		0x0000000000000000, 0x000000000000ffff, 0x00000000ffff0000, 0x00000000ffffffff,
		0x0000ffff00000000, 0x0000ffff0000ffff, 0x0000ffffffff0000, 0x0000ffffffffffff,
		0xffff000000000000, 0xffff00000000ffff, 0xffff0000ffff0000, 0xffff0000ffffffff,
		0xffffffff00000000, 0xffffffff0000ffff, 0xffffffffffff0000, 0xffffffffffffffff,
	};
	for (int i = 0; i < WORDS; i++) {
		u64 different = page[i] ^ template[i];
		if (different && different & ~units[mask[i / 2] >> (i % 2 * 4) & 15])
			return 0;
	}
	return 1;
}

/* Of the pages that this process has copied those go that say what the file says. Each range must still be a private mapping of the
 * file. Returns how many pages went, or -errno. */
i64 template_give_back(i32 fd, i32 pagemap, const struct range *ranges, u64 count, u64 masks_at)
{
	u64 before, template[WORDS], entries[PER_READ], given = 0;
	u8 mask[MASK];
	u64 thread = (u64)__builtin_thread_pointer();
	i64 failed = set_signals(~0UL, &before);
	for (u64 i = 0; i < count && !failed; i++) {
		u64 start = ranges[i].start, end = start + ranges[i].length, run = start; /* run..page go together */
		for (u64 page = start, number = 0; page < end && !failed; page += PAGE, number = (number + 1) % PER_READ) {
			u64 offset = ranges[i].offset + page - start;
			if (!number && call(NR_PREAD64, (u64)pagemap, (u64)entries, sizeof entries, page / PAGE * 8, 0, 0) <= 0) {
				end = page;
				break;
			}
			if (COPIED(entries[number]) && page - thread + THREAD >= 2 * THREAD &&
			    call(NR_PREAD64, (u64)fd, (u64)template, PAGE, offset, 0, 0) == PAGE &&
			    call(NR_PREAD64, (u64)fd, (u64)mask, MASK, masks_at + offset / PAGE * MASK, 0, 0) == MASK &&
			    is_same((u64 *)page, template, mask)) {
				given++;
				continue;
			}
			if (run < page)
				failed = call(NR_MADVISE, run, page - run, MADV_DONTNEED, 0, 0, 0);
			run = page + PAGE;
		}
		if (run < end && !failed)
			failed = call(NR_MADVISE, run, end - run, MADV_DONTNEED, 0, 0, 0);
	}
	set_signals(before, 0);
	return failed ? failed : (i64)given;
}
