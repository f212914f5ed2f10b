/* Places blocks of memory side by side in the snapshot if commands write to them. A part of
   front.c, which works without this file.

   A command writes to some thousand objects of the snapshot, mostly to their reference counts, and
   copies each page that contains one of them. Objects lie in the order in which they were made, so
   that most of these pages contain few of them. Here the snapshot's memory is made twice. A child
   process makes it first, and then runs commands (run_watched() in snapshot.py) whose memory
   is read-only: a signal handler stores each address that is written. The parent process repeats
   the allocations, and takes the blocks that were written from an area of their own.

   A block is identified by its size and by its number among the allocations of this size. Where
   the two processes allocate differently, wrong blocks are in the areas, which costs time only;
   after each import the numbers are the same again (next_section()).

   Not for arm64, where a program cannot have itself interrupted after one instruction (x86's trap
   flag). */
#include <sys/wait.h>
#include <ucontext.h>

/* The numbers of a phase: 1 for commands in general, 2 for what only a new container needs. Each
   has an area; a block that is written in both is in the first one. */
enum { PHASES = 2 };
/* Classes of sizes, GRAIN bytes apart, whose blocks are placed; class 0 stands for all others. Of
   each class the first allocations only. */
enum { CLASSES = 128, ALLOCATIONS = 1 << 20, SECTION = 1 << 14 };

/* Shared by the two processes: the phase of each allocation, or 0, and the bytes of each area. */
struct order {
	size_t bytes[PHASES + 1];
	unsigned char phases[CLASSES][ALLOCATIONS];
};
struct allocation {
	unsigned int class, number;
};

static struct order *order;	    /* NULL: blocks are placed as without this file */
static struct allocation *origins; /* the block that begins at a grain of the region; NULL in the
				       parent process */
static unsigned int allocations[CLASSES], section;
static int phase; /* 0 unless writes are stored */
static char *areas[PHASES + 1], *area_ends[PHASES + 1];
static PyMemAllocatorEx allocators[2];
static const PyMemAllocatorDomain domains[] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};

static size_t grain_of(const void *address)
{
	return ((uintptr_t)address - REGION_START) / GRAIN;
}

/* Count an allocation and return its class. */
static unsigned int count_allocation(size_t size)
{
	size_t class = (size + GRAIN - 1) / GRAIN;
	if (class >= CLASSES || allocations[class] == ALLOCATIONS - 1)
		return 0;
	allocations[class]++;
	return class;
}

/* next_section(): number the allocations from the next multiple of SECTION on. A section with more
   of them runs into the next one. */
static PyObject *next_section(PyObject *self, PyObject *unused)
{
	section++;
	for (int class = 0; class < CLASSES && section < ALLOCATIONS / SECTION; class++)
		allocations[class] = section * SECTION;
	Py_RETURN_NONE;
}

/* Take the block of the present allocation from its area. NULL if it has none. */
static void *take_placed(unsigned int class, size_t size)
{
	int area = origins == NULL ? order->phases[class][allocations[class]] : 0;
	size_t bytes = GRAIN + class * GRAIN;
	if (class == 0 || area == 0 || bytes > (size_t)(area_ends[area] - areas[area]))
		return NULL;
	char *start = areas[area];
	areas[area] += bytes;
	*(size_t *)start = size; /* as in take_block(), because free() and realloc() get it */
	return start + GRAIN;
}

/* In the child process: store which allocation has made the block. Returns the block. */
static void *store_origin(unsigned int class, void *block)
{
	if (origins != NULL && block != NULL && is_in_region(block))
		origins[grain_of(block)] = (struct allocation){class, allocations[class]};
	return block;
}

static void forget_origin(const void *block)
{
	if (origins != NULL && is_in_region(block))
		origins[grain_of(block)].class = 0;
}

static void *ordered_malloc(void *context, size_t size)
{
	const PyMemAllocatorEx *plain = context;
	unsigned int class = count_allocation(size);
	void *block = take_placed(class, size);
	return block != NULL ? block : store_origin(class, plain->malloc(plain->ctx, size));
}

static void *ordered_calloc(void *context, size_t count, size_t size)
{
	const PyMemAllocatorEx *plain = context;
	size_t bytes;
	if (__builtin_mul_overflow(count, size, &bytes))
		return NULL;
	unsigned int class = count_allocation(bytes);
	void *block = take_placed(class, bytes); /* an area is all zero */
	return block != NULL ? block : store_origin(class, plain->calloc(plain->ctx, count, size));
}

static void *ordered_realloc(void *context, void *block, size_t size)
{
	const PyMemAllocatorEx *plain = context;
	unsigned int class = count_allocation(size);
	void *moved = plain->realloc(plain->ctx, block, size);
	if (moved == NULL)
		return NULL;
	forget_origin(block);
	void *placed = take_placed(class, size);
	if (placed == NULL)
		return store_origin(class, moved);
	memcpy(placed, moved, size);
	plain->free(plain->ctx, moved);
	return placed;
}

/* While writes are stored, no block is freed. Its place would get a new block, to which no system
   call could write, because the page is read-only. */
static void ordered_free(void *context, void *block)
{
	const PyMemAllocatorEx *plain = context;
	if (phase != 0)
		return;
	forget_origin(block);
	plain->free(plain->ctx, block);
}

static void order_allocations(void)
{
	for (int i = 0; i < 2; i++) {
		PyMem_GetAllocator(domains[i], &allocators[i]);
		PyMemAllocatorEx ordered = {&allocators[i], ordered_malloc, ordered_calloc,
					    ordered_realloc, ordered_free};
		PyMem_SetAllocator(domains[i], &ordered);
	}
}

/* From here on blocks come from Python's allocators, which pass the blocks of an area to
   __wrap_free() and __wrap_realloc(). */
static void end_order(void)
{
	if (order == NULL)
		return;
	for (int i = 0; i < 2; i++)
		PyMem_SetAllocator(domains[i], &allocators[i]);
	munmap(order, sizeof *order);
	order = NULL;
}

/* Return 1 in a child process, which has to prepare the interpreter and to run commands. Return 0
   in the parent process after the child's end: the areas are there then, unless the child has
   failed. */
static int fork_watched(void)
{
	int flags = MAP_ANONYMOUS | MAP_NORESERVE;
	size_t bytes = REGION / GRAIN * sizeof *origins;
	void *shared = mmap(NULL, sizeof *order, PROT_READ | PROT_WRITE, MAP_SHARED | flags, -1, 0);
	if (shared == MAP_FAILED)
		return 0;
	order = shared;
	pid_t child = fork();
	if (child == 0) {
		origins = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | flags, -1, 0);
		if (origins == MAP_FAILED)
			_exit(1);
	} else if (child > 0)
		waitpid(child, NULL, 0);
	order_allocations();
	for (int i = 1; child != 0 && i <= PHASES; i++) {
		size_t size = rounded(order->bytes[i], ALIGNMENT);
		areas[i] = take(size);
		area_ends[i] = areas[i] == NULL ? NULL : areas[i] + size;
	}
	return child == 0;
}

/* -- the child process: which blocks are written */

enum { TRAP_FLAG = 0x100, PAGE = 4096, PAGES_OF_AN_INSTRUCTION = 8 };
enum { POOL = 16384 }; /* of Python's allocator for small objects */
static uintptr_t writable[PAGES_OF_AN_INSTRUCTION];
static int writable_count;
static size_t watched_bytes; /* of the region */

/* Store the phase for the block that contains the address. */
static void store_phase(uintptr_t address)
{
	size_t grain = grain_of((void *)address);
	for (size_t before = 0; before < CLASSES && before <= grain; before++) {
		struct allocation origin = origins[grain - before];
		if (origin.class == 0)
			continue;
		if (before >= origin.class) /* the block ends before the address */
			return;
		unsigned char *stored = &order->phases[origin.class][origin.number];
		if (*stored == 0 || *stored > phase) {
			size_t bytes = GRAIN + origin.class * GRAIN;
			order->bytes[*stored] -= bytes;
			order->bytes[phase] += bytes;
			*stored = phase;
		}
		return;
	}
}

/* For SIGSEGV: repeat the write with a writable page. */
static void on_write(int number, siginfo_t *info, void *context)
{
	uintptr_t address = (uintptr_t)info->si_addr;
	if (address - REGION_START >= watched_bytes || writable_count == PAGES_OF_AN_INSTRUCTION) {
		signal(SIGSEGV, SIG_DFL); /* any other fault */
		return;
	}
	store_phase(address);
	uintptr_t page = address & -(uintptr_t)PAGE;
	writable[writable_count++] = page;
	mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE);
	((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
}

/* For SIGTRAP, after the instruction: make the pages read-only again. */
static void on_instruction(int number, siginfo_t *info, void *context)
{
	while (writable_count)
		mprotect((void *)writable[--writable_count], PAGE, PROT_READ);
	((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~(greg_t)TRAP_FLAG;
}

/* Make the pools read-only. A pool with one block stays writable: new blocks come from such pools
   (see _fill_pools()), and system calls write to new blocks. */
static void protect_pools(void)
{
	watched_bytes = region_used & -(size_t)POOL;
	for (size_t start = 0; start < watched_bytes; start += POOL) {
		int blocks = 0;
		for (size_t grain = start / GRAIN; grain < (start + POOL) / GRAIN; grain++)
			blocks += origins[grain].class != 0;
		if (blocks > 1)
			mprotect((char *)REGION_START + start, POOL, PROT_READ);
	}
}

/* watch(phase): from now on store for this phase which blocks are written. Only for a child of the
   child process, made for one command. */
static PyObject *watch(PyObject *self, PyObject *number)
{
	struct sigaction write = {.sa_sigaction = on_write, .sa_flags = SA_SIGINFO};
	struct sigaction instruction = {.sa_sigaction = on_instruction, .sa_flags = SA_SIGINFO};
	long value = PyLong_AsLong(number);
	if (value < 1 || value > PHASES || origins == NULL)
		return PyErr_Format(PyExc_ValueError, "watch() takes 1 to %d", PHASES);
	phase = value;
	sigaction(SIGSEGV, &write, NULL);
	sigaction(SIGTRAP, &instruction, NULL);
	protect_pools();
	Py_RETURN_NONE;
}
