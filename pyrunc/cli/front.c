/* `pyrunc` as a program of its own: CPython linked in, started with what a command of milliseconds needs and nothing else.

   Against `python -I -S script` this saves the search for the standard library, the locale, the reading of a script and of
   one file per module (their code lies in one bundle, see bundled.py), libffi for the raw system calls, and the destruction of
   the interpreter at the end. It is the same Python and the same code; when the interpreter that it was linked from is not
   the installed one any more, it executes the plain script instead.

   Compiled by entry.py, which defines: PYTHON (path), PYTHON_MTIME_NS, PYTHON_SIZE, STDLIB, DYNLOAD, SCRIPT, BUNDLE, FOLDERS
   (what follows the standard library in sys.path, separated by colons). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <marshal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_ARGUMENTS = 6 };

/* -- the module `_pyrunc`: system calls without ctypes */

/* call(number, *arguments): the result, or the negative errno. An argument is an int, None (a null pointer) or a buffer, whose
   address is passed; the kernel may write into one that is not read-only. */
static PyObject *call(PyObject *self, PyObject *const *words, Py_ssize_t count)
{
	long values[MOST_ARGUMENTS] = {0};
	Py_buffer views[MOST_ARGUMENTS];
	int held = 0;
	PyObject *result = NULL;

	if (count < 1 || count > MOST_ARGUMENTS + 1)
		return PyErr_Format(PyExc_TypeError, "call() takes a number and up to six arguments");
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

/* address(buffer): where its first byte is; the caller keeps the buffer alive and of its size. */
static PyObject *address(PyObject *self, PyObject *buffer)
{
	Py_buffer view;
	if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	PyObject *found = PyLong_FromVoidPtr(view.buf);
	PyBuffer_Release(&view);
	return found;
}

static int is_of(const struct stat *status, long long mtime_ns, long long size)
{
	return status->st_size == size && status->st_mtim.tv_sec * 1000000000LL + status->st_mtim.tv_nsec == mtime_ns;
}

/* bundle(): the bundle as a read-only memoryview, None without one. */
static PyObject *bundle(PyObject *self, PyObject *nothing)
{
	struct stat status;
	int file = open(BUNDLE, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		Py_RETURN_NONE;
	void *start = MAP_FAILED;
	if (fstat(file, &status) == 0 && status.st_size > 0)
		start = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
	close(file);
	if (start == MAP_FAILED)
		Py_RETURN_NONE;
	return PyMemoryView_FromMemory(start, status.st_size, PyBUF_READ);
}

/* is_unchanged(path, mtime_ns, size): whether a file is still the one of this time and size. */
static PyObject *is_unchanged(PyObject *self, PyObject *const *words, Py_ssize_t count)
{
	struct stat status;
	const char *path = count == 3 ? PyUnicode_AsUTF8(words[0]) : NULL;
	if (path == NULL)
		return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "is_unchanged() takes three arguments");
	long long mtime_ns = PyLong_AsLongLong(words[1]), size = PyLong_AsLongLong(words[2]);
	if (PyErr_Occurred())
		return NULL;
	return PyBool_FromLong(stat(path, &status) == 0 && is_of(&status, mtime_ns, size));
}

static PyMethodDef functions[] = {
	{"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL},
	{"address", address, METH_O, NULL},
	{"bundle", bundle, METH_NOARGS, NULL},
	{"is_unchanged", (PyCFunction)(void (*)(void))is_unchanged, METH_FASTCALL, NULL},
	{NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_pyrunc", .m_methods = functions};

static PyObject *make_module(void)
{
	return PyModule_Create(&module);
}

#ifdef WITHOUT_SHA2
/* The static library names this module but lacks what it calls (see entry.py). hashlib does without: it takes OpenSSL's. */
PyMODINIT_FUNC PyInit__sha2(void)
{
	return PyErr_Format(PyExc_ImportError, "_sha2 is not part of this program");
}
#endif

#if PY_VERSION_HEX < 0x030c0000
/* CPython 3.11 enters every name of every frozen module into the table of interned strings at each start, those of modules that
   nobody imports too: half a millisecond. This takes the place of that (see entry.py): names are then compared by their text,
   and interned where they are first used. CPython 3.13 does no such thing any more. */
int __wrap__Py_Deepfreeze_Init(void);
int __wrap__Py_Deepfreeze_Init(void)
{
	return 0;
}
#endif

/* -- the interpreter */

/* Modules that the interpreter itself loads from files before anybody could hand it a bundle. */
#include FROZEN

static int linked_from_the_installed_one(void)
{
	struct stat status;
	return stat(PYTHON, &status) == 0 && is_of(&status, PYTHON_MTIME_NS, PYTHON_SIZE);
}

static void execute_the_script(int count, char **words)
{
	char *arguments[count + 3];
	arguments[0] = PYTHON, arguments[1] = "-IS", arguments[2] = SCRIPT;
	for (int i = 1; i <= count; i++) /* with the NULL at the end */
		arguments[i + 2] = words[i];
	execv(PYTHON, arguments);
	perror(PYTHON);
	_exit(1);
}

static PyStatus configure(PyConfig *config, int count, char **words)
{
	PyPreConfig before;
	PyPreConfig_InitIsolatedConfig(&before);
	before.utf8_mode = 1;
	before.configure_locale = 0;
	PyStatus status = Py_PreInitialize(&before);
	if (PyStatus_Exception(status))
		return status;
	PyConfig_InitIsolatedConfig(config);
	config->site_import = 0;
	config->parse_argv = 0;
	config->write_bytecode = 1;
	config->install_signal_handlers = 1;
	config->pathconfig_warnings = 0;
	config->module_search_paths_set = 1;
	static const wchar_t *const paths[] = {STDLIB, DYNLOAD};
	for (int i = 0; i < 2; i++) {
		status = PyWideStringList_Append(&config->module_search_paths, paths[i]);
		if (PyStatus_Exception(status))
			return status;
	}
	wchar_t **const strings[] = {&config->program_name, &config->executable, &config->base_executable};
	for (int i = 0; i < 3; i++) {
		status = PyConfig_SetBytesString(config, strings[i], PYTHON);
		if (PyStatus_Exception(status))
			return status;
	}
	wchar_t **const prefixes[] = {&config->prefix, &config->exec_prefix, &config->base_prefix, &config->base_exec_prefix};
	for (int i = 0; i < 4; i++) {
		status = PyConfig_SetBytesString(config, prefixes[i], PREFIX);
		if (PyStatus_Exception(status))
			return status;
	}
	status = PyConfig_SetString(config, &config->stdlib_dir, STDLIB);
	if (PyStatus_Exception(status))
		return status;
	return PyConfig_SetBytesArgv(config, count, words);
}

int main(int count, char **words)
{
	PyConfig config;

	if (!linked_from_the_installed_one())
		execute_the_script(count, words);
	if (PyImport_AppendInittab("_pyrunc", make_module) < 0)
		return 1;
	PyImport_FrozenModules = frozen;
	PyStatus status = configure(&config, count, words);
	if (!PyStatus_Exception(status))
		status = Py_InitializeFromConfig(&config);
	if (PyStatus_Exception(status))
		Py_ExitStatusException(status);
	PyObject *start = PyImport_ImportModule("_pyrunc_start"); /* ends the process */
	if (start == NULL)
		PyErr_Print();
	_exit(1);
}
