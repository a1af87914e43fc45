/* Resampling of 8-bit pixels with the numbers of Pillow's Image.resize, by vectors of four channels (decision 083).

Columns and rows are resampled by two calls, in weights of fixed point with 22 bits, each rounded to 8 bits. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The first channel of a pixel must be the lowest byte of its word."
#endif

#define BITS 22
#define HALF (1 << (BITS - 1))
/* Rows that are resampled together: they share the weights. */
#define GROUP 4

/* One of two versions is chosen when the module is loaded; of the C libraries, glibc can do that. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

typedef uint8_t bytes_16 __attribute__((vector_size(16)));
typedef uint16_t shorts_8 __attribute__((vector_size(16)));
typedef uint32_t words_4 __attribute__((vector_size(16)));
typedef uint64_t longs_2 __attribute__((vector_size(16)));
typedef int32_t sums_4 __attribute__((vector_size(16)));

/* Alternate the elements of two lower halves: an instruction of every processor. GCC and Clang name it differently. */
#ifdef __clang__
#define ZIP(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZIP(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* For each output: its first input, the number of inputs, and their weights. */
typedef struct {
    int32_t *first, *count, *weights;
    int most;
} Table;

INLINE sums_4 load(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof(word));
    bytes_16 four = (bytes_16)(words_4){word, 0, 0, 0}, zero = {0};
    shorts_8 wider = (shorts_8)ZIP(bytes_16, four, zero, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return (sums_4)ZIP(shorts_8, wider, (shorts_8)zero, 0, 8, 1, 9, 2, 10, 3, 11);
}

/* Write the first `bytes` of four numbers below 256. */
INLINE void store(uint8_t *to, sums_4 sums, size_t bytes) {
    longs_2 pairs = (longs_2)(sums >> BITS);
    pairs |= pairs >> 24;
    uint32_t word = (uint32_t)(pairs[0] & 0xFFFF) | (uint32_t)(pairs[1] & 0xFFFF) << 16;
    memcpy(to, &word, bytes);
}

/* Resample a pixel of each of GROUP rows. */
INLINE void resample_pixel(
    const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, int channels, const int32_t *weights,
    int count, size_t bytes) {
    sums_4 a = {HALF, HALF, HALF, HALF}, b = a, c = a, d = a;
    for (int i = 0; i < count; i++, from += channels) {
        a += load(from) * weights[i];
        b += load(from + from_stride) * weights[i];
        c += load(from + 2 * from_stride) * weights[i];
        d += load(from + 3 * from_stride) * weights[i];
    }
    store(to, a, bytes);
    store(to + to_stride, b, bytes);
    store(to + 2 * to_stride, c, bytes);
    store(to + 3 * to_stride, d, bytes);
}

/* Resample the columns of GROUP rows. Pixels are read and written as four bytes, whatever their number of channels:
   the pixel after it overwrites the bytes beyond, and the last of a row is written without them. */
FOR_EACH_PROCESSOR
static void resample_group(
    const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, int width, int channels, Table table) {
    for (int x = 0; x < width; x++) {
        const uint8_t *first = from + (size_t)table.first[x] * channels;
        const int32_t *weights = table.weights + (size_t)x * table.most;
        uint8_t *out = to + (size_t)x * channels;
        if ((width - x) * channels >= 4) {
            resample_pixel(first, from_stride, out, to_stride, channels, weights, table.count[x], 4);
        } else {
            resample_pixel(first, from_stride, out, to_stride, channels, weights, table.count[x], channels);
        }
    }
}

/* Average `count` rows by their weights into one. */
FOR_EACH_PROCESSOR
static void average_rows(
    const uint8_t *from, size_t bytes, uint8_t *to, int32_t *sums, const int32_t *weights, int count) {
    for (size_t x = 0; x < bytes; x++) {
        sums[x] = HALF;
    }
    for (int i = 0; i < count; i++, from += bytes) {
        int32_t weight = weights[i];
        for (size_t x = 0; x < bytes; x++) {
            sums[x] += from[x] * weight;
        }
    }
    for (size_t x = 0; x < bytes; x++) {
        to[x] = (uint8_t)(sums[x] >> BITS);
    }
}

static double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

static double bilinear(double x) { return fabs(x) < 1.0 ? 1.0 - fabs(x) : 0.0; }

/* Fill the table of `size` outputs of the part from `begin` to `end` of `from` inputs, in Pillow's order of operations and
   with its types; -1 if there is no memory. What lies beside the part has weights, too, as far as the filter reaches. */
static int make_table(Table *table, int from, int size, int is_box, float begin, float end_of_part) {
    double scale = (double)(end_of_part - begin) / size, stretch = scale < 1.0 ? 1.0 : scale;
    double support = (is_box ? 0.5 : 1.0) * stretch, narrow = 1.0 / stretch;
    table->most = (int)ceil(support) * 2 + 1;
    double *exact = PyMem_RawMalloc(sizeof(double) * table->most);
    table->first = PyMem_RawMalloc(sizeof(int32_t) * size * (2 + (size_t)table->most));
    if (exact == NULL || table->first == NULL) {
        PyMem_RawFree(exact);
        return -1;
    }
    table->count = table->first + size;
    table->weights = table->count + size;
    for (int at = 0; at < size; at++) {
        double centre = begin + (at + 0.5) * scale, sum = 0.0;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        first = first < 0 ? 0 : first;
        end = end > from ? from : end;
        for (int i = first; i < end; i++) {
            double x = (i - centre + 0.5) * narrow;
            sum += exact[i - first] = is_box ? box(x) : bilinear(x);
        }
        for (int i = 0; i < end - first; i++) {
            double weight = sum != 0.0 ? exact[i] / sum : exact[i];
            table->weights[(size_t)at * table->most + i] = (int32_t)(0.5 + weight * (1 << BITS));
        }
        table->first[at] = first;
        table->count[at] = end - first;
    }
    PyMem_RawFree(exact);
    return 0;
}

/* Resample the columns of a picture; -1 if there is no memory. */
static int columns_of(
    const uint8_t *from, int height, int width, uint8_t *to, int size, int channels, int is_box, float begin,
    float end) {
    size_t from_stride = (size_t)width * channels, to_stride = (size_t)size * channels;
    /* Copies are read and written where four rows, or four bytes of the last pixel of a row, may be too many. */
    uint8_t *last = PyMem_RawCalloc(1, GROUP * (from_stride + to_stride) + 4);
    Table table = {0};
    int failed = last == NULL || make_table(&table, width, size, is_box, begin, end);
    if (!failed) {
        uint8_t *last_to = last + GROUP * from_stride + 4;
        for (int y = 0; y < height; y += GROUP) {
            const uint8_t *rows = from + y * from_stride;
            uint8_t *out = to + y * to_stride;
            if (y + GROUP < height && from_stride >= 4) {
                resample_group(rows, from_stride, out, to_stride, size, channels, table);
                continue;
            }
            int count = height - y < GROUP ? height - y : GROUP;
            memcpy(last, rows, count * from_stride);
            resample_group(last, from_stride, last_to, to_stride, size, channels, table);
            memcpy(out, last_to, count * to_stride);
        }
    }
    PyMem_RawFree(last);
    PyMem_RawFree(table.first);
    return failed ? -1 : 0;
}

/* Resample the rows of a picture, of which `count` from `top` on are given; -1 if there is no memory, 1 if others are
   needed. */
static int rows_of(
    const uint8_t *from, int top, int count, int height, size_t bytes, uint8_t *to, int size, int is_box, float begin,
    float end) {
    int32_t *sums = PyMem_RawMalloc(sizeof(int32_t) * bytes);
    Table table = {0};
    int failed = sums == NULL || make_table(&table, height, size, is_box, begin, end) ? -1 : 0;
    for (int y = 0; y < size && !failed; y++) {
        failed = table.first[y] < top || table.first[y] + table.count[y] > top + count;
    }
    for (int y = 0; y < size && !failed; y++) {
        const uint8_t *first = from + (table.first[y] - top) * bytes;
        average_rows(first, bytes, to + y * bytes, sums, table.weights + (size_t)y * table.most, table.count[y]);
    }
    PyMem_RawFree(sums);
    PyMem_RawFree(table.first);
    return failed;
}

static int is_part(float begin, float end, int size) { return begin >= 0.0 && begin < end && end <= size; }

/* Release both arrays; return None, or NULL with an exception. */
static PyObject *ended(Py_buffer *from, Py_buffer *to, int valid, int in_picture, int failed) {
    PyBuffer_Release(from);
    PyBuffer_Release(to);
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "The arrays have not as many bytes as the sizes say.");
        return NULL;
    }
    if (!in_picture || failed > 0) {
        PyErr_SetString(PyExc_ValueError, "The part is not within the picture, or not within the rows that are given.");
        return NULL;
    }
    if (failed) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *resample_columns(PyObject *module, PyObject *arguments) {
    Py_buffer from, to;
    int height, width, channels, size, is_box, failed = 0;
    float begin = 0.0f, end = -1.0f;
    if (!PyArg_ParseTuple(arguments, "y*(iii)w*ip|ff:resample_columns", &from, &height, &width, &channels, &to, &size,
                          &is_box, &begin, &end)) {
        return NULL;
    }
    end = PyTuple_GET_SIZE(arguments) < 7 ? width : end;
    int in_picture = is_part(begin, end, width);
    int valid = height > 0 && width > 0 && size > 0 && channels > 0 && channels <= 4 &&
                from.len == (Py_ssize_t)height * width * channels && to.len == (Py_ssize_t)height * size * channels;
    if (valid && in_picture) {
        Py_BEGIN_ALLOW_THREADS
        failed = columns_of(from.buf, height, width, to.buf, size, channels, is_box, begin, end);
        Py_END_ALLOW_THREADS
    }
    return ended(&from, &to, valid, in_picture, failed);
}

static PyObject *resample_rows(PyObject *module, PyObject *arguments) {
    Py_buffer from, to;
    int count, height, size, is_box, top = 0, failed = 0;
    float begin = 0.0f, end = -1.0f;
    if (!PyArg_ParseTuple(arguments, "y*iw*ip|ffii:resample_rows", &from, &count, &to, &size, &is_box, &begin, &end,
                          &top, &height)) {
        return NULL;
    }
    height = PyTuple_GET_SIZE(arguments) < 9 ? count : height;
    end = PyTuple_GET_SIZE(arguments) < 7 ? height : end;
    int in_picture = top >= 0 && height >= count && top <= height - count && is_part(begin, end, height);
    int valid = count > 0 && size > 0 && from.len > 0 && from.len % count == 0 && to.len == from.len / count * size;
    if (valid && in_picture) {
        Py_BEGIN_ALLOW_THREADS
        failed = rows_of(from.buf, top, count, height, from.len / count, to.buf, size, is_box, begin, end);
        Py_END_ALLOW_THREADS
    }
    return ended(&from, &to, valid, in_picture, failed);
}

static PyMethodDef methods[] = {
    {"resample_columns", resample_columns, METH_VARARGS, "Resample the columns, see picture_resample.pyi."},
    {"resample_rows", resample_rows, METH_VARARGS, "Resample the rows, see picture_resample.pyi."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) { return PyModule_AddStringConstant(module, "COMPILED_FROM", COMPILED_FROM); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "picture_resample",
    .m_slots = slots,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_picture_resample(void) { return PyModuleDef_Init(&definition); }
