// Gather, FP8 E4M3 and CRC-64/NVME of KV cells in one pass; one thread block works on one (slot, layer).
//
// The element functions are marked for the host, too, so that they are tested where there is no GPU. Their definitions
// are those of kv_transport.kernels: scales are powers of two per channel (biased by 127), rounding is to nearest even.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KV_BOTH __host__ __device__ static inline
#define KV_PIECES_MAX 256
#define KV_BF16_TOP 0x7F78

// The exponent that a channel is divided by, from the largest magnitude in it.
KV_BOTH int kv_scale_of(u32 top) {
    int scale = (int)(top >> 7) - 8 + ((top & 0x7F) > 0x68 ? 1 : 0);
    return scale < 1 ? 1 : scale;
}

KV_BOTH float kv_float_of(u32 bf16) {
    union { u32 bits; float value; } both;
    both.bits = bf16 << 16;
    return both.value;
}

KV_BOTH u8 kv_quantise(u32 bf16, int scale) {
    float size = scalbnf(kv_float_of(bf16 & 0x7FFF), 127 - scale);
    int exponent = -6;
    if (size >= 0.015625f) {
        frexpf(size, &exponent);
        exponent -= 1;
    }
    int steps = (int)rintf(scalbnf(size, 3 - exponent));
    return (u8)((((exponent + 7) << 3) + steps - 8) | ((bf16 >> 8) & 0x80));
}

// CRC of a piece of 8-byte multiples; `tables` are eight of 256 entries (slicing by eight).
KV_BOTH u64 kv_crc(const u8 *bytes, u32 nbytes, const u64 *tables) {
    u64 crc = ~0ull;
    u32 at = 0;
    for (; at + 8 <= nbytes; at += 8) {
        u64 word = 0;
        for (int i = 7; i >= 0; --i) word = word << 8 | bytes[at + i];
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; ++i) crc ^= tables[(7 - i) * 256 + ((word >> (8 * i)) & 0xFF)];
    }
    for (; at < nbytes; ++at) crc = tables[(crc ^ bytes[at]) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

// The CRC of something followed by as many bytes as `shift` (64 columns of a matrix over GF(2)) stands for.
KV_BOTH u64 kv_shift(u64 crc, const u64 *shift) {
    u64 moved = 0;
    for (int i = 0; i < 64; ++i) moved ^= (crc >> i & 1) ? shift[i] : 0;
    return moved;
}

// CRC of `nbytes` by all threads of a block: `pieces` (a power of two) equal parts, joined pairwise.
// `shifts` holds one operator for each round. Every thread must call it; thread 0 gets the result.
__device__ static u64 kv_crc_block(
    const u8 *bytes, u32 nbytes, u32 pieces, const u64 *tables, const u64 *shifts, u64 *shared
) {
    u32 part = nbytes / pieces;
    for (u32 i = threadIdx.x; i < pieces; i += blockDim.x) shared[i] = kv_crc(bytes + (u64)i * part, part, tables);
    __syncthreads();
    for (u32 round = 0, width = 1; width < pieces; ++round, width *= 2) {
        for (u32 i = threadIdx.x * 2 * width; i < pieces; i += blockDim.x * 2 * width)
            shared[i] = kv_shift(shared[i], shifts + 64 * round) ^ shared[i + width];
        __syncthreads();
    }
    u64 result = shared[0];
    __syncthreads();
    return result;
}

// Cells to the rows of `out`, with the CRC of each as it lies there.
extern "C" __global__ void kv_gather(
    const u8 *data, const long long *offsets, u32 cell_nbytes, u8 *out, u64 *checks,
    const u64 *tables, const u64 *shifts, u32 pieces
) {
    __shared__ u64 shared[KV_PIECES_MAX];
    const u8 *source = data + offsets[blockIdx.x];
    u8 *target = out + (u64)blockIdx.x * cell_nbytes;
    for (u32 i = threadIdx.x; i < cell_nbytes; i += blockDim.x) target[i] = source[i];
    __syncthreads();
    u64 crc = kv_crc_block(target, cell_nbytes, pieces, tables, shifts, shared);
    if (threadIdx.x == 0) checks[blockIdx.x] = crc;
}

// Rows back into cells, with the CRC of each as it lies in its slot.
extern "C" __global__ void kv_scatter(
    u8 *data, const long long *offsets, u32 cell_nbytes, const u8 *rows, u64 *checks,
    const u64 *tables, const u64 *shifts, u32 pieces
) {
    __shared__ u64 shared[KV_PIECES_MAX];
    u8 *target = data + offsets[blockIdx.x];
    const u8 *source = rows + (u64)blockIdx.x * cell_nbytes;
    for (u32 i = threadIdx.x; i < cell_nbytes; i += blockDim.x) target[i] = source[i];
    __syncthreads();
    u64 crc = kv_crc_block(target, cell_nbytes, pieces, tables, shifts, shared);
    if (threadIdx.x == 0) checks[blockIdx.x] = crc;
}

// bf16 cells to encoded rows (scales, then codes), with the CRC of each row; `bad` is raised by a value that is not
// finite, or would not be when it came back.
extern "C" __global__ void kv_gather_fp8(
    const u8 *data, const long long *offsets, u32 matrices, u32 tokens, u32 channels, u8 *out, u64 *checks, u32 *bad,
    const u64 *tables, const u64 *shifts, u32 pieces
) {
    __shared__ u64 shared[KV_PIECES_MAX];
    u32 num_scales = matrices * channels, row_nbytes = num_scales * (tokens + 1);
    const u16 *source = (const u16 *)(data + offsets[blockIdx.x]);
    u8 *row = out + (u64)blockIdx.x * row_nbytes;
    for (u32 i = threadIdx.x; i < num_scales; i += blockDim.x) {
        u32 first = i / channels * tokens * channels + i % channels, top = 0;
        for (u32 token = 0; token < tokens; ++token) {
            u32 size = source[first + token * channels] & 0x7FFF;
            top = size > top ? size : top;
        }
        if (top >= KV_BF16_TOP) atomicOr(bad, 1u);
        int scale = kv_scale_of(top);
        row[i] = (u8)scale;
        for (u32 token = 0; token < tokens; ++token) {
            u32 at = first + token * channels;
            row[num_scales + at] = kv_quantise(source[at], scale);
        }
    }
    __syncthreads();
    u64 crc = kv_crc_block(row, row_nbytes, pieces, tables, shifts, shared);
    if (threadIdx.x == 0) checks[blockIdx.x] = crc;
}
