// Gather, FP8 E4M3 and CRC-64/NVME of KV cells in one pass; one thread block works on one (slot, layer).
//
// The element functions are marked for the host, too, so that they are tested where there is no GPU. Their definitions
// are those of kv_transport.kernels: a scale byte per channel, an exponent in quarters; rounding is to nearest even.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KV_BOTH __host__ __device__ static inline
#define KV_PIECES_MAX 256
#define KV_TOP_MAX 0x4DC3
#define KV_CANDIDATES 4

// Products and sums that are not fused: errors are compared, so they must be those of the host to the last bit.
#ifdef __CUDA_ARCH__
#define KV_MUL(a, b) __fmul_rn(a, b)
#define KV_ADD(a, b) __fadd_rn(a, b)
#else
#define KV_MUL(a, b) ((a) * (b))
#define KV_ADD(a, b) ((a) + (b))
#endif

KV_BOTH float kv_as_float(u32 bits) {
    union { u32 bits; float value; } both;
    both.bits = bits;
    return both.value;
}

// 2 ** ((n - 176) / 4): what scale byte n stands for; its inverse is that of 352 - n.
KV_BOTH float kv_power(int n) {
    u32 quarter = n % 4 == 0 ? 0x3F800000u : n % 4 == 1 ? 0x3F9837F0u : n % 4 == 2 ? 0x3FB504F3u : 0x3FD744FDu;
    return kv_as_float(quarter + ((u32)(n / 4) << 23) - (44u << 23));
}

// The least scale that brings the largest magnitude of a channel to at most 464, which rounds to 448.
KV_BOTH int kv_least_scale(u32 top) {
    u32 mantissa = top & 0x7F;
    int scale = 4 * (int)(top >> 7) - 367;
    scale += (mantissa > 9) + (mantissa > 36) + (mantissa > 67) + (mantissa > 104);
    return scale < 0 ? 0 : scale > 255 ? 255 : scale;
}

KV_BOTH float kv_float_of(u32 bf16) {
    return kv_as_float(bf16 << 16);
}

KV_BOTH u32 kv_quantise(u32 bf16, int scale) {
    float size = KV_MUL(kv_float_of(bf16 & 0x7FFF), kv_power(352 - scale));
    int exponent = -6;
    if (size >= 0.015625f) {
        frexpf(size, &exponent);
        exponent -= 1;
    }
    int steps = (int)rintf(scalbnf(size, 3 - exponent));
    return (u32)(((exponent + 7) << 3) + steps - 8) | ((bf16 >> 8) & 0x80);
}

// The squared error of rounding to the 4 bits that E4M3 keeps of a number, by Veltkamp's splitting.
KV_BOTH float kv_squared_error(float value) {
    float split = KV_MUL(value, 1048577.0f);
    float error = KV_ADD(value, -KV_ADD(split, -KV_ADD(split, -value)));
    return KV_MUL(error, error);
}

// The scale of least squared error for a channel, whose values are `stride` apart.
KV_BOTH int kv_choose_scale(const u16 *values, u32 tokens, u32 stride, u32 top) {
    int least = kv_least_scale(top), best = least;
    float fewest = 0;
    for (int candidate = 0; candidate < KV_CANDIDATES && least + candidate < 256; ++candidate) {
        float inverse = kv_power(352 - least - candidate), errors = 0;
        for (u32 token = 0; token < tokens; ++token)
            errors = KV_ADD(errors, kv_squared_error(KV_MUL(kv_float_of(values[(u64)token * stride]), inverse)));
        errors = KV_MUL(errors, kv_power(176 + 2 * candidate));
        if (candidate == 0 || errors < fewest) {
            fewest = errors;
            best = least + candidate;
        }
    }
    return best;
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

// bf16 cells to encoded rows (scales, then codes), with the CRC of each row; `bad` is raised by a value that has no
// scale: the rows are then worth nothing.
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
        if (top > KV_TOP_MAX) {
            atomicOr(bad, 1u);
            continue;
        }
        int scale = kv_choose_scale(source + first, tokens, channels, top);
        row[i] = (u8)scale;
        for (u32 token = 0; token < tokens; ++token) {
            u32 at = first + token * channels;
            row[num_scales + at] = (u8)kv_quantise(source[at], scale);
        }
    }
    __syncthreads();
    u64 crc = kv_crc_block(row, row_nbytes, pieces, tables, shifts, shared);
    if (threadIdx.x == 0) checks[blockIdx.x] = crc;
}
