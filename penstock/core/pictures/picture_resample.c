/* Resampling of 8-bit pixels with the numbers of Pillow's Image.resize, by vectors of four channels (decision 083).

Columns and rows are resampled by two calls, in weights of fixed point with 22 bits, each rounded to 8 bits. Means of a
few columns or rows are the same numbers by shorter ways. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The first channel of a pixel must be the lowest byte of its word."
#endif

#define BITS 22
#define HALF (1 << (BITS - 1))
/* Rows that are resampled together: they share the weights. */
#define GROUP 4
/* Means of so many columns, or rows, at most need no product of 32 bits. */
#define MOST_COLUMNS 5
#define MOST_ROWS 4
/* Bytes of a row that are averaged together, to half as many at most. */
#define WINDOW 16
#define MOST_PAIRS ((MOST_COLUMNS + 1) / 2)

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

/* For each output: its first input, the number of inputs, and their weights; whether each output is a mean. */
typedef struct {
    int32_t *first, *count, *weights;
    int most, is_means;
} Table;

/* What is made of a window: for each output byte, the places of its inputs, in pairs, and 2^15 over their number. */
typedef struct {
    size_t from, to;
    uint8_t places[MOST_PAIRS][WINDOW];
    int16_t factors[WINDOW / 2];
} Window;

/* The windows of a row; none where columns are not averaged by windows. */
typedef struct {
    Window *all;
    int count, pairs;
} Windows;

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

#ifdef __x86_64__
#define AVX2 __attribute__((target("avx2")))

static int has_windows(void) { return __builtin_cpu_supports("avx2"); }

INLINE AVX2 __m256i load_two(const uint8_t *from, size_t stride) {
    __m128i first = _mm_loadu_si128((const __m128i *)from), second = _mm_loadu_si128((const __m128i *)(from + stride));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

INLINE AVX2 __m256i load_twice(const void *from) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(from)); }

INLINE AVX2 __m256i add_pairs(__m256i rows, __m256i places) {
    return _mm256_maddubs_epi16(_mm256_shuffle_epi8(rows, places), _mm256_set1_epi8(1));
}

/* Average the columns of a window of GROUP rows: inputs are put side by side, added, and multiplied with rounding. */
INLINE AVX2 void average_window(
    const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, const Window *window, int pairs,
    size_t bytes) {
    __m256i upper = load_two(from, from_stride), lower = load_two(from + 2 * from_stride, from_stride);
    __m256i places = load_twice(window->places[0]), more = load_twice(window->places[1]);
    __m256i a = _mm256_add_epi16(add_pairs(upper, places), add_pairs(upper, more));
    __m256i b = _mm256_add_epi16(add_pairs(lower, places), add_pairs(lower, more));
    for (int pair = 2; pair < pairs; pair++) {
        places = load_twice(window->places[pair]);
        a = _mm256_add_epi16(a, add_pairs(upper, places));
        b = _mm256_add_epi16(b, add_pairs(lower, places));
    }
    __m256i factors = load_twice(window->factors);
    /* Rows 0 and 2, then 1 and 3. */
    __m256i means = _mm256_packus_epi16(_mm256_mulhrs_epi16(a, factors), _mm256_mulhrs_epi16(b, factors));
    __m128i even = _mm256_castsi256_si128(means), odd = _mm256_extracti128_si256(means, 1);
    uint64_t rows[GROUP] = {_mm_cvtsi128_si64(even), _mm_cvtsi128_si64(odd), _mm_extract_epi64(even, 1),
                            _mm_extract_epi64(odd, 1)};
    for (int row = 0; row < GROUP; row++) {
        memcpy(to + row * to_stride, &rows[row], bytes);
    }
}

/* Average the columns of GROUP rows, with the numbers of `resample_group`. */
AVX2 static void average_group(
    const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, const Windows *windows) {
    int pairs = windows->pairs;
    for (const Window *window = windows->all, *end = window + windows->count; window < end; window++) {
        const uint8_t *first = from + window->from;
        uint8_t *out = to + window->to;
        size_t left = to_stride - window->to;
        if (left >= WINDOW / 2) {
            /* The window after it overwrites what is too many. */
            average_window(first, from_stride, out, to_stride, window, pairs, WINDOW / 2);
        } else {
            average_window(first, from_stride, out, to_stride, window, pairs, left);
        }
    }
}
#else
static int has_windows(void) { return 0; }

static void average_group(
    const uint8_t *from, size_t from_stride, uint8_t *to, size_t to_stride, const Windows *windows) {}
#endif

/* Average `count` rows that weigh the same, MOST_ROWS at most, into one: `average_rows` rounds halves up, too. */
FOR_EACH_PROCESSOR
static void average_few(const uint8_t *from, size_t bytes, uint8_t *restrict to, int count) {
    const uint8_t *second = from + bytes, *third = second + bytes, *fourth = third + bytes;
    if (count == 1) {
        memcpy(to, from, bytes);
    } else if (count == 2) {
        for (size_t x = 0; x < bytes; x++) {
            to[x] = (uint8_t)((from[x] + second[x] + 1) >> 1);
        }
    } else if (count == 3) {
        for (size_t x = 0; x < bytes; x++) {
            to[x] = (uint8_t)((uint16_t)(from[x] + second[x] + third[x] + 1) / 3);
        }
    } else {
        for (size_t x = 0; x < bytes; x++) {
            to[x] = (uint8_t)((uint16_t)(from[x] + second[x] + third[x] + fourth[x] + 2) >> 2);
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
    table->is_means = 1;
    for (int at = 0; at < size; at++) {
        double centre = begin + (at + 0.5) * scale, sum = 0.0;
        int first = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        first = first < 0 ? 0 : first;
        end = end > from ? from : end;
        for (int i = first; i < end; i++) {
            double x = (i - centre + 0.5) * narrow;
            sum += exact[i - first] = is_box ? box(x) : bilinear(x);
        }
        /* By rounding, the last may be without weight. */
        while (end - first > 1 && exact[end - first - 1] == 0.0) {
            end--;
        }
        table->is_means &= sum > 0.0 && sum == end - first;
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

/* Describe the window of `count` outputs from `at` on. */
static void fill_window(Window *window, const Table *table, int at, int count, int channels) {
    window->from = (size_t)table->first[at] * channels;
    window->to = (size_t)at * channels;
    /* The byte at a place beyond the window is 0. */
    memset(window->places, 0xFF, sizeof(window->places));
    memset(window->factors, 0, sizeof(window->factors));
    for (int x = 0; x < count; x++) {
        int begin = table->first[at + x] - table->first[at], inputs = table->count[at + x];
        /* One is taken twice, because 2^15 is no signed number of 16 bits. */
        int summed = inputs == 1 ? 2 : inputs;
        for (int channel = 0; channel < channels; channel++) {
            int byte = x * channels + channel;
            window->factors[byte] = (int16_t)((1 << 15) / summed);
            for (int i = 0; i < summed; i++) {
                int input = inputs == 1 ? begin : begin + i;
                window->places[i / 2][2 * byte + i % 2] = (uint8_t)(input * channels + channel);
            }
        }
    }
}

/* Divide the outputs among windows; no windows if that cannot be done, and -1 if there is no memory. */
static int make_windows(Windows *windows, const Table *table, int size, int channels) {
    if (!table->is_means || !has_windows()) {
        return 0;
    }
    windows->all = PyMem_RawMalloc(sizeof(Window) * size);
    if (windows->all == NULL) {
        return -1;
    }
    for (int at = 0, count; at < size; at += count) {
        for (count = 0; at + count < size && count < WINDOW / 2 / channels; count++) {
            int x = at + count, inputs = table->first[x] + table->count[x] - table->first[at];
            if (table->count[x] > MOST_COLUMNS || inputs > WINDOW / channels) {
                break;
            }
            int pairs = (table->count[x] + 1) / 2;
            windows->pairs = pairs > windows->pairs ? pairs : windows->pairs;
        }
        if (count == 0) {
            windows->count = 0;
            return 0;
        }
        fill_window(&windows->all[windows->count++], table, at, count, channels);
    }
    return 0;
}

/* Resample the columns of a picture; -1 if there is no memory. */
static int columns_of(
    const uint8_t *from, int height, int width, uint8_t *to, int size, int channels, int is_box, float begin,
    float end) {
    size_t from_stride = (size_t)width * channels, to_stride = (size_t)size * channels;
    /* Copies are read and written where four rows, or the bytes after them, may be too many. */
    uint8_t *last = PyMem_RawCalloc(1, GROUP * (from_stride + to_stride) + WINDOW);
    Table table = {0};
    Windows windows = {0};
    int failed = last == NULL || make_table(&table, width, size, is_box, begin, end) ||
                 make_windows(&windows, &table, size, channels);
    for (int y = 0; y < height && !failed; y += GROUP) {
        int count = height - y < GROUP ? height - y : GROUP, is_copied = y + GROUP >= height || from_stride < WINDOW;
        const uint8_t *rows = from + y * from_stride;
        uint8_t *out = is_copied ? last + GROUP * from_stride + WINDOW : to + y * to_stride;
        if (is_copied) {
            rows = memcpy(last, rows, count * from_stride);
        }
        if (windows.count) {
            average_group(rows, from_stride, out, to_stride, &windows);
        } else {
            resample_group(rows, from_stride, out, to_stride, size, channels, table);
        }
        if (is_copied) {
            memcpy(to + y * to_stride, out, count * to_stride);
        }
    }
    PyMem_RawFree(last);
    PyMem_RawFree(table.first);
    PyMem_RawFree(windows.all);
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
        if (table.is_means && table.count[y] <= MOST_ROWS) {
            average_few(first, bytes, to + y * bytes, table.count[y]);
        } else {
            average_rows(first, bytes, to + y * bytes, sums, table.weights + (size_t)y * table.most, table.count[y]);
        }
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
