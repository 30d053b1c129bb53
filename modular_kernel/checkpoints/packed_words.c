/* Transposes and permutes matrices of packed codes; see modular_kernel/checkpoints/packed_words.py.
 *
 *     transpose(source, stride, layout, depth, columns, bits, order, out, out_stride)
 *
 * The result has a row for each of the `columns` N, in which the codes of K are packed: byte b of a
 * row has code b, or codes 2 b (low nibble) and 2 b + 1.
 *
 * source: address of int32 words. stride: words between two rows.
 * layout: 0, GPTQ: (K bits / 32, N), a word packs codes of consecutive k.
 *         1: (N, K bits / 32), as in the result.
 *         2, AWQ: (K, N / 8), nibble i of a word has column AWQ_ORDER[i] of its eight columns.
 * depth: K, a multiple of 32 / bits, or of 2 in layout 2.
 * bits: 4 or 8; 4 in layout 2.
 * order: address of K int32, the source of each k; 0 keeps the order.
 * out: address of the result. out_stride: bytes between two rows.
 *
 * Work is divided into tiles of 64 columns. A tile is first read as rows of bytes, one row for each
 * byte of K. Selecting rows permutes K. Blocks of 64 rows are then transposed in registers, so that
 * a row of the result is written in whole cache lines.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 64 /* columns, and rows of a block: bytes of a cache line */
#define LANES 16 /* bytes of a vector */

enum Layout { GPTQ, ROWS, AWQ };

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(LANES)));
typedef uint32_t Words __attribute__((vector_size(LANES)));
typedef uint8_t Row[TILE]; /* a byte of each column of a tile */
typedef int32_t Index __attribute__((aligned(1))); /* tensors can start at any byte of a file */

typedef struct {
  const uint32_t *source;
  ptrdiff_t stride;
  enum Layout layout;
  ptrdiff_t columns, rows; /* rows: bytes of K */
  int bits;
  const Index *order;
  uint8_t *out;
  ptrdiff_t out_stride;
} Matrix;

static const int AWQ_ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Bytes){__VA_ARGS__})
#endif

static inline Bytes interleave_low(Bytes a, Bytes b) {
  return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

static inline Bytes interleave_high(Bytes a, Bytes b) {
  return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

static inline Bytes words_low(Bytes a, Bytes b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
}

static inline Bytes words_high(Bytes a, Bytes b) {
  return SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

static inline Bytes load(const void *from) {
  Bytes vector;
  memcpy(&vector, from, LANES);
  return vector;
}

static inline void store(void *to, Bytes vector) { memcpy(to, &vector, LANES); }

/* Interleave the first and the second half of `count` vectors, four times. With 16 vectors this is
 * a transposition; with 4 vectors it collects byte b of each word in vector b. */
static inline __attribute__((always_inline)) void interleave_four_times(Bytes *v, int count) {
  Bytes next[LANES];
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < count / 2; ++i) {
      next[2 * i] = interleave_low(v[i], v[i + count / 2]);
      next[2 * i + 1] = interleave_high(v[i], v[i + count / 2]);
    }
    for (int i = 0; i < count; ++i)
      v[i] = next[i];
  }
}

/* Transpose 16 rows of 16 bytes. */
static inline void transpose_square(const uint8_t *from, ptrdiff_t from_stride, uint8_t *to,
                                    ptrdiff_t to_stride) {
  Bytes v[LANES];
  for (int i = 0; i < LANES; ++i)
    v[i] = load(from + i * from_stride);
  interleave_four_times(v, LANES);
  for (int i = 0; i < LANES; ++i)
    store(to + i * to_stride, v[i]);
}

/* Fetch the words of a tile in the row TILE / 4 rows after `words`, which the next block needs. */
static inline void prefetch_words(const Matrix *m, const uint32_t *words) {
  for (int c = 0; c < TILE; c += LANES)
    __builtin_prefetch(words + TILE / 4 * m->stride + c);
}

/* Read byte rows [first, first + count) of a tile. `count` is at most TILE, and a multiple of 4. */
static void read_gptq(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first, int count,
                      Row *rows) {
  uint32_t partial[TILE] = {0};
  for (int r = 0; r < count; r += 4) {
    const uint32_t *words = m->source + (first + r) / 4 * m->stride + column;
    prefetch_words(m, words);
    if (width < TILE)
      words = memcpy(partial, words, width * sizeof(uint32_t));
    for (int c = 0; c < TILE; c += LANES) {
      Bytes v[4];
      for (int i = 0; i < 4; ++i)
        v[i] = load(words + c + 4 * i);
      interleave_four_times(v, 4);
      for (int i = 0; i < 4; ++i)
        store(rows[r + i] + c, v[i]);
    }
  }
}

static void read_rows(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first, int count,
                      Row *rows) {
  uint8_t lines[TILE][TILE];
  if (width < TILE || count < TILE)
    memset(lines, 0, sizeof(lines));
  for (int c = 0; c < width; ++c)
    memcpy(lines[c], (const uint8_t *)(m->source + (column + c) * m->stride) + first, count);
  uint8_t transposed[TILE][TILE];
  for (int c = 0; c < TILE; c += LANES)
    for (int r = 0; r < count; r += LANES)
      transpose_square(&lines[c][r], TILE, &transposed[r][c], TILE);
  memcpy(rows, transposed, count * sizeof(Row));
}

/* Bytes 0 to 31 of a row have columns of even nibbles, and bytes 32 to 63 those of odd nibbles. */
static void read_awq(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first, int count,
                     Row *rows) {
  const Words low = {0x0F0F0F0F, 0x0F0F0F0F, 0x0F0F0F0F, 0x0F0F0F0F};
  uint32_t partial[2][TILE / 8] = {{0}};
  for (int r = 0; r < count; ++r) {
    const uint32_t *even_k = m->source + 2 * (first + r) * m->stride + column / 8;
    const uint32_t *odd_k = even_k + m->stride;
    if (width < TILE) {
      even_k = memcpy(partial[0], even_k, width / 2);
      odd_k = memcpy(partial[1], odd_k, width / 2);
    }
    for (int w = 0; w < TILE / 8; w += 4) {
      Words a = (Words)load(even_k + w), b = (Words)load(odd_k + w);
      store(rows[r] + 4 * w, (Bytes)((a & low) | (b & low) << 4));
      store(rows[r] + TILE / 2 + 4 * w, (Bytes)((a >> 4 & low) | (b & ~low)));
    }
  }
}

/* Return the column of a tile that byte `position` of its rows has. */
static int column_of(const Matrix *m, int position) {
  if (m->layout != AWQ)
    return position;
  int odd = position >= TILE / 2, byte = position % (TILE / 2);
  return byte / 4 * 8 + AWQ_ORDER[2 * (byte % 4) + odd];
}

static void read_block(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first, int count,
                       Row *rows) {
  switch (m->layout) {
  case GPTQ:
    read_gptq(m, column, width, first, count, rows);
    return;
  case ROWS:
    read_rows(m, column, width, first, count, rows);
    return;
  case AWQ:
    read_awq(m, column, width, first, count, rows);
  }
}

/* Select the rows of a block of the result from those of the whole tile. */
static void select_rows(const Matrix *m, const Row *tile, ptrdiff_t first, int count, Row *rows) {
  const Halves mask = {0x0F0F, 0x0F0F, 0x0F0F, 0x0F0F, 0x0F0F, 0x0F0F, 0x0F0F, 0x0F0F};
  if (m->bits == 8) {
    for (int r = 0; r < count; ++r)
      memcpy(rows[r], tile[m->order[first + r]], TILE);
    return;
  }
  for (int r = 0; r < count; ++r) {
    int32_t low = m->order[2 * (first + r)], high = m->order[2 * (first + r) + 1];
    int low_shift = low % 2 * 4, high_shift = high % 2 * 4;
    for (int c = 0; c < TILE; c += LANES) {
      Halves a = (Halves)load(tile[low / 2] + c) >> low_shift & mask;
      Halves b = (Halves)load(tile[high / 2] + c) >> high_shift & mask;
      store(rows[r] + c, (Bytes)(a | b << 4));
    }
  }
}

/* Write the lines of a block: line `position` to the row of column column_of(m, position). */
static inline void write_lines(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first,
                               int count, uint8_t (*lines)[TILE]) {
  for (int position = 0; position < TILE; ++position) {
    int c = column_of(m, position);
    if (c >= width)
      continue;
    uint8_t *line = m->out + (column + c) * m->out_stride + first;
    __builtin_prefetch(line + 2 * TILE, 1); /* of the block after the next */
    if (count == TILE)
      memcpy(line, lines[position], TILE);
    else
      memcpy(line, lines[position], count);
  }
}

static void write_block(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first, int count,
                        const Row *rows) {
  uint8_t lines[TILE][TILE];
  for (int r = 0; r < TILE; r += LANES)
    for (int c = 0; c < TILE; c += LANES)
      transpose_square(&rows[r][c], TILE, &lines[c][r], TILE);
  write_lines(m, column, width, first, count, lines);
}

/* Transpose a block of whole words, whose bytes are already in the order of K. */
static void transpose_words(const Matrix *m, ptrdiff_t column, int width, ptrdiff_t first,
                            int count) {
  uint8_t lines[TILE][TILE];
  uint32_t partial[4][TILE] = {{0}};
  for (int r = 0; r < count; r += LANES) {
    const uint32_t *words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = partial[i];
      if (r + 4 * i < count) {
        const uint32_t *row = m->source + ((first + r) / 4 + i) * m->stride + column;
        prefetch_words(m, row);
        words[i] = width < TILE ? memcpy(partial[i], row, width * sizeof(uint32_t)) : row;
      }
    }
    for (int i = 0; i < TILE; i += 4) {
      Bytes a = load(words[0] + i), b = load(words[1] + i);
      Bytes c = load(words[2] + i), d = load(words[3] + i);
      Bytes low_ac = words_low(a, c), low_bd = words_low(b, d);
      Bytes high_ac = words_high(a, c), high_bd = words_high(b, d);
      store(lines[i] + r, words_low(low_ac, low_bd));
      store(lines[i + 1] + r, words_high(low_ac, low_bd));
      store(lines[i + 2] + r, words_low(high_ac, high_bd));
      store(lines[i + 3] + r, words_high(high_ac, high_bd));
    }
  }
  write_lines(m, column, width, first, count, lines);
}

/* tile: memory for m->rows rows if there is an order, and otherwise for TILE rows; padded to a
 * multiple of TILE. */
static void transpose_tile(const Matrix *m, ptrdiff_t column, Row *tile) {
  int width = m->columns - column < TILE ? (int)(m->columns - column) : TILE;
  Row selected[TILE] = {{0}};
  if (m->order)
    for (ptrdiff_t first = 0; first < m->rows; first += TILE) {
      int count = m->rows - first < TILE ? (int)(m->rows - first) : TILE;
      read_block(m, column, width, first, count, tile + first);
    }
  for (ptrdiff_t first = 0; first < m->rows; first += TILE) {
    int count = m->rows - first < TILE ? (int)(m->rows - first) : TILE;
    if (m->layout == GPTQ && !m->order) {
      transpose_words(m, column, width, first, count);
      continue;
    }
    if (m->order)
      select_rows(m, tile, first, count, selected);
    else
      read_block(m, column, width, first, count, tile);
    write_block(m, column, width, first, count, m->order ? selected : tile);
  }
}

static int in_range(const Matrix *m) {
  ptrdiff_t depth = m->rows * (8 / m->bits);
  for (ptrdiff_t k = 0; m->order && k < depth; ++k)
    if (m->order[k] < 0 || m->order[k] >= depth)
      return 0;
  return 1;
}

static PyObject *transpose(PyObject *self, PyObject *args) {
  unsigned long long source, order, out;
  long long stride, depth, columns, out_stride;
  int layout, bits;
  if (!PyArg_ParseTuple(args, "KLiLLiKKL", &source, &stride, &layout, &depth, &columns, &bits,
                        &order, &out, &out_stride))
    return NULL;
  Matrix m = {(const uint32_t *)(uintptr_t)source,
              stride,
              (enum Layout)layout,
              columns,
              depth * bits / 8,
              bits,
              (const Index *)(uintptr_t)order,
              (uint8_t *)(uintptr_t)out,
              out_stride};
  if (!in_range(&m))
    return PyErr_Format(PyExc_IndexError, "order: need numbers from 0 to %lld", depth - 1);
  size_t rows = m.order ? (size_t)(m.rows + TILE - 1) / TILE * TILE : TILE;
  Row *tile = calloc(rows, sizeof(Row));
  if (!tile)
    return PyErr_NoMemory();
  Py_BEGIN_ALLOW_THREADS;
  for (ptrdiff_t column = 0; column < m.columns; column += TILE)
    transpose_tile(&m, column, tile);
  Py_END_ALLOW_THREADS;
  free(tile);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"transpose", transpose, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "modular_kernel_packed_words", NULL,
                                        -1, methods};

PyMODINIT_FUNC PyInit_modular_kernel_packed_words(void) { return PyModule_Create(&definition); }
