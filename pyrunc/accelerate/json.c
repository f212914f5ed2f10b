/* Reads and writes plain JSON for a command. A part of front.c, which works without this file.

   The functions of the standard library's module `_json` are in a shared object, which cannot be in
   the snapshot. To load it takes 0.3 ms, a tenth of a short command. The functions here take what
   nearly all state files and configurations consist of: ASCII, integers of up to 18 digits, and
   exact types. For anything else, errors among it, they return None, and the caller uses `_json`
   (use_plain_json() in snapshot.py). */

enum { MOST_DEPTH = 100, MOST_DIGITS = 18 };

/* -- reading */

struct reader {
	const char *at, *end;
	int depth;
};

static void skip_white(struct reader *reader)
{
	while (reader->at < reader->end && memchr(" \t\n\r", *reader->at, 4) != NULL)
		reader->at++;
}

/* Skip white space and then `character`. Returns 0 where another character stands. */
static int skip(struct reader *reader, char character)
{
	skip_white(reader);
	if (reader->at == reader->end || *reader->at != character)
		return 0;
	reader->at++;
	return 1;
}

static char unescaped(char escape)
{
	static const char escapes[] = "\"\\/bfnrt", characters[] = "\"\\/\b\f\n\r\t";
	const char *place = escape != '\0' ? strchr(escapes, escape) : NULL;
	return place != NULL ? characters[place - escapes] : '\0';
}

/* Read the rest of a string, after its first quotation mark. */
static PyObject *read_string(struct reader *reader)
{
	const char *start = reader->at, *end = start;
	Py_ssize_t escapes = 0;

	for (; end < reader->end && *end != '"'; end++) {
		if ((unsigned char)*end < ' ')
			return NULL;
		if (*end == '\\') {
			escapes++;
			if (++end == reader->end || unescaped(*end) == '\0')
				return NULL;
		}
	}
	if (end == reader->end)
		return NULL;
	reader->at = end + 1;
	PyObject *string = PyUnicode_New(end - start - escapes, 127);
	if (string == NULL)
		return NULL;
	char *to = (char *)PyUnicode_1BYTE_DATA(string);
	if (escapes == 0)
		memcpy(to, start, end - start);
	else
		while (start < end) {
			if (*start == '\\')
				*to++ = unescaped(start[1]), start += 2;
			else
				*to++ = *start++;
		}
	return string;
}

static PyObject *read_integer(struct reader *reader)
{
	const char *at = reader->at;
	int negative = *at == '-';
	const char *digits = at += negative;
	long long value = 0;

	while (at < reader->end && Py_ISDIGIT(*at) && at - digits < MOST_DIGITS)
		value = value * 10 + *at++ - '0';
	if (at == digits || (*digits == '0' && at - digits > 1))
		return NULL;
	if (at < reader->end && (Py_ISDIGIT(*at) || *at == '.' || *at == 'e' || *at == 'E'))
		return NULL;
	reader->at = at;
	return PyLong_FromLongLong(negative ? -value : value);
}

static PyObject *read_word(struct reader *reader, const char *word, PyObject *value)
{
	size_t length = strlen(word);
	if ((size_t)(reader->end - reader->at) < length || memcmp(reader->at, word, length))
		return NULL;
	reader->at += length;
	return Py_NewRef(value);
}

static PyObject *read_value(struct reader *reader);

static PyObject *read_list(struct reader *reader)
{
	PyObject *list = PyList_New(0);
	if (list == NULL || skip(reader, ']'))
		return list;
	do {
		PyObject *item = read_value(reader);
		int failed = item == NULL || PyList_Append(list, item) < 0;
		Py_XDECREF(item);
		if (failed)
			goto fail;
	} while (skip(reader, ','));
	if (skip(reader, ']'))
		return list;
fail:
	Py_DECREF(list);
	return NULL;
}

static PyObject *read_object(struct reader *reader)
{
	PyObject *dict = PyDict_New();
	if (dict == NULL || skip(reader, '}'))
		return dict;
	do {
		PyObject *key = skip(reader, '"') ? read_string(reader) : NULL;
		PyObject *value = key != NULL && skip(reader, ':') ? read_value(reader) : NULL;
		int failed = value == NULL || PyDict_SetItem(dict, key, value) < 0;
		Py_XDECREF(key);
		Py_XDECREF(value);
		if (failed)
			goto fail;
	} while (skip(reader, ','));
	if (skip(reader, '}'))
		return dict;
fail:
	Py_DECREF(dict);
	return NULL;
}

/* Return a new value; NULL with or without an exception when it cannot be read here. */
static PyObject *read_value(struct reader *reader)
{
	PyObject *value = NULL;

	skip_white(reader);
	if (reader->at == reader->end || reader->depth == MOST_DEPTH)
		return NULL;
	reader->depth++;
	switch (*reader->at) {
	case '{':
		reader->at++;
		value = read_object(reader);
		break;
	case '[':
		reader->at++;
		value = read_list(reader);
		break;
	case '"':
		reader->at++;
		value = read_string(reader);
		break;
	case 't':
		value = read_word(reader, "true", Py_True);
		break;
	case 'f':
		value = read_word(reader, "false", Py_False);
		break;
	case 'n':
		value = read_word(reader, "null", Py_None);
		break;
	default:
		value = read_integer(reader);
	}
	reader->depth--;
	return value;
}

/* read_json(text, start): the value that begins there and the index of its end, as `scan_once` of
   `_json` returns them; or None. */
static PyObject *read_json(PyObject *self, PyObject *arguments)
{
	PyObject *text;
	Py_ssize_t start;

	if (!PyArg_ParseTuple(arguments, "Un", &text, &start))
		return NULL;
	Py_ssize_t length = PyUnicode_GET_LENGTH(text);
	if (!PyUnicode_IS_ASCII(text) || start < 0 || start > length)
		Py_RETURN_NONE;
	const char *data = (const char *)PyUnicode_1BYTE_DATA(text);
	struct reader reader = {data + start, data + length, 0};
	PyObject *value = read_value(&reader);
	if (value == NULL && PyErr_Occurred())
		return NULL;
	if (value == NULL)
		Py_RETURN_NONE;
	return Py_BuildValue("Nn", value, (Py_ssize_t)(reader.at - data));
}

/* -- writing */

struct writer {
	char *text;
	size_t length, room;
	int depth;
};

static int put(struct writer *writer, const char *text, size_t length)
{
	if (length > writer->room - writer->length) {
		size_t room = 2 * writer->room + length;
		char *moved = PyMem_RawRealloc(writer->text, room);
		if (moved == NULL)
			return 0;
		writer->text = moved;
		writer->room = room;
	}
	memcpy(writer->text + writer->length, text, length);
	writer->length += length;
	return 1;
}

static int put_character(struct writer *writer, unsigned char character)
{
	static const char escapes[] = "\"\\bfnrt", characters[] = "\"\\\b\f\n\r\t";
	const char *place = character != '\0' ? strchr(characters, character) : NULL;
	char text[8] = {'\\', place != NULL ? escapes[place - characters] : 'u'};

	if (place != NULL)
		return put(writer, text, 2);
	if (character < ' ' || character > '~')
		return put(writer, text, snprintf(text, sizeof text, "\\u%04x", character));
	return put(writer, (const char *)&character, 1);
}

static int put_string(struct writer *writer, PyObject *string)
{
	if (!PyUnicode_CheckExact(string) || !PyUnicode_IS_ASCII(string))
		return 0;
	const unsigned char *data = PyUnicode_1BYTE_DATA(string);
	Py_ssize_t length = PyUnicode_GET_LENGTH(string);
	int done = put(writer, "\"", 1);
	for (Py_ssize_t i = 0; done && i < length; i++)
		done = put_character(writer, data[i]);
	return done && put(writer, "\"", 1);
}

static int put_integer(struct writer *writer, PyObject *integer)
{
	int overflow;
	char text[24];
	long long value = PyLong_AsLongLongAndOverflow(integer, &overflow);
	return !overflow && put(writer, text, snprintf(text, sizeof text, "%lld", value));
}

static int put_value(struct writer *writer, PyObject *value);

static int put_items(struct writer *writer, PyObject *sequence)
{
	PyObject **items = PySequence_Fast_ITEMS(sequence);
	Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
	int done = put(writer, "[", 1);
	for (Py_ssize_t i = 0; done && i < count; i++)
		done = (i == 0 || put(writer, ",", 1)) && put_value(writer, items[i]);
	return done && put(writer, "]", 1);
}

static int put_dict(struct writer *writer, PyObject *dict)
{
	PyObject *key, *value;
	Py_ssize_t position = 0;
	int done = put(writer, "{", 1), first = 1;
	while (done && PyDict_Next(dict, &position, &key, &value)) {
		done = (first || put(writer, ",", 1)) && put_string(writer, key) &&
		       put(writer, ":", 1) && put_value(writer, value);
		first = 0;
	}
	return done && put(writer, "}", 1);
}

/* Returns 0 when the value cannot be written here. */
static int put_value(struct writer *writer, PyObject *value)
{
	int done = 0;

	if (writer->depth == MOST_DEPTH)
		return 0;
	writer->depth++;
	if (value == Py_None)
		done = put(writer, "null", 4);
	else if (value == Py_True)
		done = put(writer, "true", 4);
	else if (value == Py_False)
		done = put(writer, "false", 5);
	else if (PyLong_CheckExact(value))
		done = put_integer(writer, value);
	else if (PyDict_CheckExact(value))
		done = put_dict(writer, value);
	else if (PyList_CheckExact(value) || PyTuple_CheckExact(value))
		done = put_items(writer, value);
	else
		done = put_string(writer, value);
	writer->depth--;
	return done;
}

/* write_json(value): its compact ASCII text, or None. */
static PyObject *write_json(PyObject *self, PyObject *value)
{
	struct writer writer = {NULL, 0, 0, 0};
	PyObject *text = NULL;
	if (put_value(&writer, value))
		text = PyUnicode_FromKindAndData(PyUnicode_1BYTE_KIND, writer.text, writer.length);
	else
		text = Py_NewRef(Py_None);
	PyMem_RawFree(writer.text);
	return text;
}
