/* The program `pyrunc`: CPython linked in; commands begin at a snapshot of the interpreter's
   memory.

   An interpreter needs 4 ms to start and as long again to import what a command needs, and all of
   that is the same each time. So it is done once, when the program is installed: the interpreter
   starts, imports the modules (accelerate/snapshot.py), and its memory is written to a file. A
   command maps that file at the same address, privately, so that only the pages that it touches are
   copied, and continues from there, like a child after fork(2).

   That works because all of the interpreter's memory is at the same addresses: the program is not
   position-independent, so code and data are fixed, and what the interpreter allocates comes from
   one region at a fixed address. The C library, however, lies elsewhere in each process. So the
   snapshot contains neither its data nor the tables through which the program calls its functions.
   The linker puts a few of its variables among the program's (R_*_COPY: environ, stdin, …); these
   are restored. No memory of its malloc is in the snapshot (--wrap), and no other shared object may
   be loaded.

   The snapshot contains the secret of Python's string hashes, so every command has the same secret.
   A user who can choose a configuration to exploit that may run any program anyway.

   A snapshot that was taken by another build, of another interpreter or of sources that have
   changed since is not used; then the plain script is executed, which does the same more slowly.

   Compiled by entry.py, which defines: PYTHON (path), SCRIPT, SNAPSHOT, PREFIX, STDLIB, SEARCHED
   (sys.path, strings with commas between), BUILD (a word that no other build has), and, if they
   exist, HEAP_ORDER and JSON: the paths of accelerate/heap_order.c and json.c. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_ARGUMENTS = 6 };

/* -- the module `_pyrunc`: system calls without ctypes */

/* call(number, *arguments): returns the result, or the negative errno. An argument is an int,
   None (a null pointer) or a buffer, whose address is passed; the kernel may write into a
   writable buffer. */
static PyObject *call(PyObject *self, PyObject *const *words, Py_ssize_t count)
{
	long values[MOST_ARGUMENTS] = {0};
	Py_buffer views[MOST_ARGUMENTS];
	int held = 0;
	PyObject *result = NULL;

	if (count < 1 || count > MOST_ARGUMENTS + 1)
		return PyErr_Format(PyExc_TypeError,
				    "call() takes a number and up to six arguments");
	long number = PyLong_AsLong(words[0]);
	if (number == -1 && PyErr_Occurred())
		return NULL;
	for (Py_ssize_t i = 1; i < count; i++) {
		if (words[i] == Py_None)
			continue;
		if (PyLong_Check(words[i])) {
			values[i - 1] = (long)PyLong_AsUnsignedLongMask(words[i]);
			if (PyErr_Occurred())
				goto out;
		} else {
			if (PyObject_GetBuffer(words[i], &views[held], PyBUF_SIMPLE) < 0)
				goto out;
			values[i - 1] = (long)views[held++].buf;
		}
	}
	long answer;
	Py_BEGIN_ALLOW_THREADS
	answer = syscall(number, values[0], values[1], values[2], values[3], values[4], values[5]);
	if (answer == -1)
		answer = -errno;
	Py_END_ALLOW_THREADS
	result = PyLong_FromLong(answer);
out:
	while (held)
		PyBuffer_Release(&views[--held]);
	return result;
}

/* address(buffer): returns the address of its first byte; the caller keeps it alive and
   unresized. */
static PyObject *address(PyObject *self, PyObject *buffer)
{
	Py_buffer view;
	if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	PyObject *result = PyLong_FromVoidPtr(view.buf);
	PyBuffer_Release(&view);
	return result;
}

#ifdef WITHOUT_SHA2
/* The static library lists this module but lacks its functions (see entry.py). hashlib uses
   OpenSSL's instead. */
PyMODINIT_FUNC PyInit__sha2(void)
{
	return PyErr_Format(PyExc_ImportError, "_sha2 is not part of this program");
}
#endif

/* -- memory */

/* The region from which all of the snapshot's memory is taken, in order and never freed (small
   objects come from Python's own allocator, which takes arenas of it). A command gets SPARE
   bytes more, which suffices for most; the rest comes from the C library, because a command may
   live as long as its container. (A huge page for SPARE takes longer than the pages that it
   saves.) */
#define REGION_START 0x1000000000UL
#define ALIGNMENT 0x10000UL /* of what is mapped from the file: the largest page of any machine */
enum { SPARE = 2 << 20, REGION = 128 << 20, GRAIN = 16 };
static size_t region_used, region_end; /* region_end is 0 until the region is mapped */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);
void __real_free(void *block);

static int is_in_region(const void *block)
{
	return (uintptr_t)block - REGION_START < region_end;
}

/* Take `bytes` of the region, all zero, or return NULL. For concurrent threads. */
static void *take(size_t bytes)
{
	size_t used = __atomic_load_n(&region_used, __ATOMIC_RELAXED);
	do {
		if (bytes > region_end - used)
			return NULL;
	} while (!__atomic_compare_exchange_n(&region_used, &used, used + bytes, 1,
					      __ATOMIC_RELAXED, __ATOMIC_RELAXED));
	return (char *)REGION_START + used;
}

/* Take a block, with its size stored before it. */
static void *take_block(size_t size)
{
	if (size > region_end)
		return NULL;
	char *start = take(GRAIN + (size + GRAIN - 1) / GRAIN * GRAIN);
	if (start == NULL)
		return NULL;
	*(size_t *)start = size;
	return start + GRAIN;
}

void *__wrap_malloc(size_t size)
{
	void *block = take_block(size);
	return block != NULL ? block : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
	size_t bytes;
	void *block = __builtin_mul_overflow(count, size, &bytes) ? NULL : take_block(bytes);
	return block != NULL ? block : __real_calloc(count, size);
}

void *__wrap_realloc(void *block, size_t size)
{
	if (block == NULL)
		return __wrap_malloc(size);
	if (!is_in_region(block))
		return __real_realloc(block, size);
	size_t before = *(size_t *)((char *)block - GRAIN);
	if (size <= before)
		return block;
	void *moved = __wrap_malloc(size);
	return moved == NULL ? NULL : memcpy(moved, block, before);
}

void __wrap_free(void *block)
{
	if (!is_in_region(block))
		__real_free(block);
}

/* For PyObjectArenaAllocator. */
static void *take_arena(void *context, size_t size)
{
	void *arena = take(size);
	if (arena == NULL)
		arena = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
			     0);
	return arena == MAP_FAILED ? NULL : arena;
}

static void free_arena(void *context, void *arena, size_t size)
{
	if (!is_in_region(arena))
		munmap(arena, size);
}

/* Map the file at a fixed, unused address; anonymous memory if `file` is -1. */
static int map(uintptr_t start, size_t length, int file, off_t offset)
{
	int flags = MAP_PRIVATE | MAP_FIXED_NOREPLACE;
	if (file < 0)
		flags |= MAP_ANONYMOUS | MAP_NORESERVE;
	void *place = mmap((void *)start, length, PROT_READ | PROT_WRITE, flags, file, offset);
	if (place != MAP_FAILED && place != (void *)start) /* a kernel without the flag */
		munmap(place, length);
	return place == (void *)start;
}

static uintptr_t rounded(uintptr_t value, uintptr_t to)
{
	return (value + to - 1) & ~(to - 1);
}

/* -- the order of blocks in the snapshot */

#if defined HEAP_ORDER && defined __x86_64__
#include HEAP_ORDER
#define ORDERED
#endif

#ifdef JSON
#include JSON
#endif

static PyMethodDef functions[] = {
	{"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL},
	{"address", address, METH_O, NULL},
#ifdef ORDERED
	{"next_section", next_section, METH_NOARGS, NULL},
	{"watch", watch, METH_O, NULL},
#endif
#ifdef JSON
	{"read_json", read_json, METH_VARARGS, NULL},
	{"write_json", write_json, METH_O, NULL},
#endif
	{NULL},
};
static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT, .m_name = "_pyrunc", .m_methods = functions};

static PyObject *make_module(void)
{
	return PyModule_Create(&module);
}

/* -- the snapshot */

/* The file: this head; the stamps, each mtime_ns, size (both long long) and a path; then, at
   multiples of ALIGNMENT, the region and, from the last such multiple before it, the program's
   data. */
struct head {
	char build[32];
	long long region_bytes, region_offset, data_start, data_end, data_offset, stamps_bytes;
	PyThreadState *state;
	PyObject *resume;
};
enum { STAMPS_AT_MOST = 64 << 10 };

/* The program's data, initialized or not, from the linker. The tables through which the C
   library is called lie before it. */
extern char data_start[], _end[];

static int is_unchanged(const char *path, long long mtime_ns, long long size)
{
	struct stat status;
	return stat(path, &status) == 0 && status.st_size == size &&
	       status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec == mtime_ns;
}

static int are_unchanged(const char *stamps, size_t length)
{
	const char *const end = stamps + length;
	while (stamps < end) {
		long long numbers[2];
		memcpy(numbers, stamps, sizeof numbers);
		stamps += sizeof numbers;
		if (!is_unchanged(stamps, numbers[0], numbers[1]))
			return 0;
		stamps += strlen(stamps) + 1;
	}
	return 1;
}

static int is_copy(const ElfW(Rela) * entry)
{
#ifdef __aarch64__
	return ELF64_R_TYPE(entry->r_info) == R_AARCH64_COPY;
#else
	return ELF64_R_TYPE(entry->r_info) == R_X86_64_COPY;
#endif
}

/* Save the C library's variables among ours before the data is mapped, or restore them after.
   Returns 0 when they are too many. */
enum { COPIES = 256 };

static int move_copies(char *saved, int restore)
{
	const ElfW(Rela) *table = NULL;
	const ElfW(Sym) *symbols = NULL;
	size_t count = 0, used = 0;

	for (const ElfW(Dyn) *entry = _DYNAMIC; entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag == DT_RELA)
			table = (const void *)entry->d_un.d_ptr;
		else if (entry->d_tag == DT_RELASZ)
			count = entry->d_un.d_val / sizeof *table;
		else if (entry->d_tag == DT_SYMTAB)
			symbols = (const void *)entry->d_un.d_ptr;
	}
	for (size_t i = 0; i < count; i++) {
		if (!is_copy(&table[i]))
			continue;
		void *variable = (void *)table[i].r_offset;
		/* The stack guard, an ordinary variable on arm64, is not in the snapshot, and is
		   read-only by now. */
		if ((char *)variable < data_start || (char *)variable >= _end)
			continue;
		size_t size = symbols[ELF64_R_SYM(table[i].r_info)].st_size;
		if (size > COPIES - used)
			return 0;
		memcpy(restore ? variable : saved + used, restore ? saved + used : variable, size);
		used += size;
	}
	return 1;
}

static int read_at(int file, void *start, size_t length, off_t offset)
{
	return pread(file, start, length, offset) == (ssize_t)length;
}

static void fail(const char *what)
{
	fprintf(stderr, "pyrunc: %s: %s\n", what, strerror(errno));
	_exit(1);
}

/* Map the program's data: whole pages are mapped, parts of pages are read. */
static void map_data(int file, const struct head *head)
{
	uintptr_t start = (uintptr_t)data_start, end = (uintptr_t)_end;
	uintptr_t page = sysconf(_SC_PAGESIZE);
	uintptr_t first = rounded(start, page), last = end & ~(page - 1);
	off_t offset = head->data_offset - (start & ~(ALIGNMENT - 1));
	if (!read_at(file, (void *)start, first - start, offset + start) ||
	    !read_at(file, (void *)last, end - last, offset + last))
		fail(SNAPSHOT);
	int flags = MAP_PRIVATE | MAP_FIXED;
	void *place = mmap((void *)first, last - first, PROT_READ | PROT_WRITE, flags, file,
			   offset + first);
	if (place == MAP_FAILED)
		fail(SNAPSHOT);
}

/* Read the whole file in order if its first page is not in the page cache. The kernel then caches
   it in large folios, which saves 8 to 10 % of a command's processor time. If its pages were read
   only when a command touches them, the kernel would cache and map many small folios. */
static void fill_page_cache(int file)
{
	char buffer[64 << 10];
	struct iovec first = {buffer, 1};

	if (preadv2(file, &first, 1, 0, RWF_NOWAIT) < 0 && errno == EAGAIN)
		while (read(file, buffer, sizeof buffer) > 0)
			;
}

/* Replace our memory by the snapshot's. Returns 0, with nothing changed, if no snapshot fits. */
static int restore(struct head *head)
{
	char stamps[STAMPS_AT_MOST], copies[COPIES];
	int file = open(SNAPSHOT, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return 0;
	fill_page_cache(file);
	if (!read_at(file, head, sizeof *head, 0) || memcmp(head->build, BUILD, sizeof BUILD) ||
	    head->data_start != (long long)(uintptr_t)data_start ||
	    head->data_end != (long long)(uintptr_t)_end || head->stamps_bytes > STAMPS_AT_MOST ||
	    !read_at(file, stamps, head->stamps_bytes, sizeof *head) ||
	    !are_unchanged(stamps, head->stamps_bytes) || !move_copies(copies, 0))
		goto unfit;
	if (!map(REGION_START, head->region_bytes, file, head->region_offset))
		goto unfit;
	if (!map(REGION_START + head->region_bytes, SPARE, -1, 0)) {
		munmap((void *)REGION_START, head->region_bytes);
		goto unfit;
	}
	map_data(file, head); /* cannot be undone */
	move_copies(copies, 1);
	close(file);
	return 1;
unfit:
	close(file);
	return 0;
}

static void write_at(int file, const void *start, size_t length, off_t offset)
{
	while (length) {
		ssize_t written = pwrite(file, start, length, offset);
		if (written <= 0)
			fail("the snapshot");
		start = (const char *)start + written, length -= written, offset += written;
	}
}

/* -- the interpreter */

static int count_object(struct dl_phdr_info *info, size_t size, void *count)
{
	return ++*(int *)count, 0;
}

static int shared_objects(void)
{
	int count = 0;
	dl_iterate_phdr(count_object, &count);
	return count;
}

static PyStatus configure(PyConfig *config, unsigned int hash_seed)
{
	PyPreConfig before;
	PyPreConfig_InitIsolatedConfig(&before);
	before.utf8_mode = 1;
	before.configure_locale = 0;
	PyStatus status = Py_PreInitialize(&before);
	if (PyStatus_Exception(status))
		return status;
	PyConfig_InitIsolatedConfig(config);
	config->use_hash_seed = 1;
	config->hash_seed = hash_seed;
	config->site_import = 0;
	config->parse_argv = 0;
	config->write_bytecode = 1;
	config->install_signal_handlers = 1;
	config->pathconfig_warnings = 0;
	config->module_search_paths_set = 1;
	static const wchar_t *const paths[] = {SEARCHED};
	for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
		status = PyWideStringList_Append(&config->module_search_paths, paths[i]);
		if (PyStatus_Exception(status))
			return status;
	}
	wchar_t **const strings[] = {&config->program_name, &config->executable,
				     &config->base_executable};
	for (int i = 0; i < 3; i++) {
		status = PyConfig_SetBytesString(config, strings[i], PYTHON);
		if (PyStatus_Exception(status))
			return status;
	}
	wchar_t **const prefixes[] = {&config->prefix, &config->exec_prefix, &config->base_prefix,
				      &config->base_exec_prefix};
	for (int i = 0; i < 4; i++) {
		status = PyConfig_SetBytesString(config, prefixes[i], PREFIX);
		if (PyStatus_Exception(status))
			return status;
	}
	return PyConfig_SetString(config, &config->stdlib_dir, STDLIB);
}

/* `pyrunc --write-snapshot FILE`: starts the interpreter, imports, writes the file. */
static int write_snapshot(const char *path)
{
	PyConfig config;
	unsigned int hash_seed; /* the same in both processes of heap_order.c */
	int objects = shared_objects();
	struct head head = {
		.build = BUILD, .data_start = (uintptr_t)data_start, .data_end = (uintptr_t)_end};

	if (getentropy(&hash_seed, sizeof hash_seed) < 0)
		fail("a random number");
	if (!map(REGION_START, REGION, -1, 0))
		fail("the region of memory");
	region_end = REGION;
#ifdef ORDERED
	int is_watched = fork_watched();
#endif
	PyObjectArenaAllocator arenas = {NULL, take_arena, free_arena};
	PyObject_SetArenaAllocator(&arenas);
	if (PyImport_AppendInittab("_pyrunc", make_module) < 0)
		return 1;
	PyStatus status = configure(&config, hash_seed);
	if (!PyStatus_Exception(status))
		status = Py_InitializeFromConfig(&config);
	if (PyStatus_Exception(status))
		Py_ExitStatusException(status);
	PyObject *module = PyImport_ImportModule("pyrunc.accelerate.snapshot");
	PyObject *stamps = NULL;
	if (module != NULL)
		stamps = PyObject_CallMethod(module, "prepare", "s", path);
#ifdef ORDERED
	if (is_watched && stamps != NULL)
		PyObject_CallMethod(module, "run_watched", "s", path);
	if (is_watched)
		_exit(0); /* the parent process reports errors */
	end_order();
#endif
	head.resume = stamps != NULL ? PyObject_GetAttrString(module, "resume") : NULL;
	if (head.resume == NULL) {
		PyErr_Print();
		return 1;
	}
	if (shared_objects() != objects || region_used > REGION - SPARE ||
	    PyBytes_GET_SIZE(stamps) > STAMPS_AT_MOST) {
		fprintf(stderr,
			"pyrunc: a module has loaded a shared object, or modules are too large\n");
		return 1;
	}
	int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	if (file < 0)
		fail(path);
	head.state = PyThreadState_Get();
	head.stamps_bytes = PyBytes_GET_SIZE(stamps);
	head.region_bytes = region_used = rounded(region_used, ALIGNMENT);
	region_end = region_used + SPARE;
	head.region_offset = rounded(sizeof head + head.stamps_bytes, ALIGNMENT);
	head.data_offset = head.region_offset + head.region_bytes;
	PyOS_BeforeFork(); /* each command calls PyOS_AfterFork_Child() */
	uintptr_t aligned = (uintptr_t)data_start & ~(ALIGNMENT - 1);
	off_t offset = head.data_offset - aligned + (uintptr_t)data_start;
	write_at(file, &head, sizeof head, 0);
	write_at(file, PyBytes_AS_STRING(stamps), head.stamps_bytes, sizeof head);
	write_at(file, (void *)REGION_START, head.region_bytes, head.region_offset);
	write_at(file, data_start, _end - data_start, offset);
	if (fsync(file) < 0)
		fail(path);
	posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED); /* see fill_page_cache() */
	_exit(0); /* without Py_Finalize(), because the memory is being written */
}

/* Return the environment as a dict of bytes. */
static PyObject *environment(void)
{
	PyObject *result = PyDict_New();
	for (char **entry = environ; result != NULL && *entry != NULL; entry++) {
		const char *equals = strchr(*entry, '=');
		if (equals == NULL)
			continue;
		PyObject *name = PyBytes_FromStringAndSize(*entry, equals - *entry);
		PyObject *value = PyBytes_FromString(equals + 1);
		if (name == NULL || value == NULL || PyDict_SetDefault(result, name, value) == NULL)
			return NULL;
		Py_DECREF(name);
		Py_DECREF(value);
	}
	return result;
}

static int run_command(const struct head *head, int count, char **words)
{
	struct sigaction ignore = {.sa_handler = SIG_IGN}, interrupt;
#if PY_VERSION_HEX >= 0x030c0000
	extern __thread PyThreadState *_Py_tss_tstate;
	_Py_tss_tstate = head->state;
#endif
	head->state->thread_id = PyThread_get_thread_ident();
	PyOS_AfterFork_Child(); /* locks, thread identities, and callbacks of modules */
	sigaction(SIGPIPE, &ignore, NULL);
	sigaction(SIGXFSZ, &ignore, NULL);
	sigaction(SIGINT, NULL, &interrupt);
	PyObject *arguments = PyList_New(count);
	for (int i = 0; arguments != NULL && i < count; i++) {
		PyObject *word = PyUnicode_DecodeFSDefault(words[i]);
		if (word == NULL)
			break;
		PyList_SET_ITEM(arguments, i, word);
	}
	PyObject *variables = environment();
	if (variables != NULL && !PyErr_Occurred())
		PyObject_CallFunction(head->resume, "OOi", arguments, variables,
				      interrupt.sa_handler == SIG_IGN);
	PyErr_Print(); /* resume() does not return */
	return 1;
}

static int execute_script(int count, char **words)
{
	char *arguments[count + 3];
	arguments[0] = PYTHON, arguments[1] = "-IS", arguments[2] = SCRIPT;
	for (int i = 1; i <= count; i++) /* with the NULL at the end */
		arguments[i + 2] = words[i];
	execv(PYTHON, arguments);
	perror(PYTHON);
	return 1;
}

int main(int count, char **words)
{
	struct head head;

	if (count == 3 && strcmp(words[1], "--write-snapshot") == 0)
		return write_snapshot(words[2]);
	if (restore(&head))
		_exit(run_command(&head, count, words));
	return execute_script(count, words);
}
