/* The part of libcuda.so.1 that Baton calls, over memory of this host: memfds, copied when an event
 * is asked for that was recorded DELAY_US ago. It checks its arguments as the driver would, and
 * what must be current is current. With -DREAL_HEADER it is compiled against NVIDIA's cuda.h, so
 * that the compiler compares the prototypes; BATCH is 0, 12 or 13: which batched copy there is. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef REAL_HEADER
#include "cuda.h"
#undef cuMemcpyBatchAsync
#else
typedef int CUresult, CUdevice, CUpointer_attribute, CUdevice_attribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct { int srcAccessOrder; CUmemLocation srcLocHint, dstLocHint; unsigned flags; } CUmemcpyAttributes;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NOT_INITIALIZED = 3,
       CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201,
       CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222, CUDA_ERROR_NOT_FOUND = 500, CUDA_ERROR_NOT_READY = 600, CUDA_ERROR_INVALID_HANDLE = 400 };
#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemGetAddressRange cuMemGetAddressRange_v2
#define cuIpcOpenMemHandle cuIpcOpenMemHandle_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuEventDestroy cuEventDestroy_v2
#define cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2
#endif

#define DELAY_US 500
#define MAX_MEMORY 4096
struct memory { char *base; size_t size; int fd, refs, is_foreign; char name[64]; };
struct copy { CUdeviceptr dst, src; size_t size; struct copy *next; };
struct CUstream_st { struct copy *first, *last; };
struct CUevent_st { CUstream stream; struct copy *upto; int64_t at_us; int is_done; };

static struct memory memories[MAX_MEMORY];
static int is_initialised, retained, depth;
int stand_in_num_events, stand_in_num_streams, stand_in_num_mapped, stand_in_num_batches;
int stand_in_num_modules, stand_in_num_launches;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}
static struct memory *find(CUdeviceptr p, size_t n) {
    for (int i = 0; i < MAX_MEMORY; i++) {
        CUdeviceptr b = (CUdeviceptr)(uintptr_t)memories[i].base;
        if (b && b <= p && p + n <= b + memories[i].size) return &memories[i];
    }
    return NULL;
}
static struct memory *map(int fd, size_t size) {
    for (int i = 0; i < MAX_MEMORY; i++)
        if (!memories[i].base) {
            void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (base == MAP_FAILED) return NULL;
            memset(&memories[i], 0, sizeof memories[i]);
            memories[i].base = base, memories[i].size = size, memories[i].fd = fd, memories[i].refs = 1;
            return &memories[i];
        }
    return NULL;
}
#define NEEDS_CONTEXT if (!depth) return CUDA_ERROR_INVALID_CONTEXT

CUresult cuInit(unsigned flags) { is_initialised = 1; return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return is_initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 7;
    return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = getenv("STAND_IN_MPS") != NULL;
    return device == 7 && attribute == 133 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device != 7) return CUDA_ERROR_INVALID_DEVICE;
    retained++;
    *context = (CUcontext)(uintptr_t)0x7f0123456789ULL; /* wider than 32 bits */
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return device == 7 && retained-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuCtxPushCurrent(CUcontext context) {
    if (context != (CUcontext)(uintptr_t)0x7f0123456789ULL || !retained) return CUDA_ERROR_INVALID_CONTEXT;
    depth++;
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *context) {
    NEEDS_CONTEXT;
    depth--;
    *context = (CUcontext)(uintptr_t)0x7f0123456789ULL;
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    NEEDS_CONTEXT;
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return CUDA_ERROR_INVALID_VALUE;
    struct memory *m = map(fd, size);
    if (!m) return CUDA_ERROR_INVALID_VALUE;
    *address = (CUdeviceptr)(uintptr_t)m->base;
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    NEEDS_CONTEXT;
    struct memory *m = find(address, 1);
    if (!m) return CUDA_ERROR_NOT_FOUND;
    *base = (CUdeviceptr)(uintptr_t)m->base, *size = m->size;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute != 10 || !find(address, 1)) return CUDA_ERROR_INVALID_VALUE;
    *(int *)data = getenv("STAND_IN_EXPANDABLE") == NULL;
    return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    NEEDS_CONTEXT;
    struct memory *m = find(address, 1);
    if (!m || m->is_foreign || (CUdeviceptr)(uintptr_t)m->base != address) return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle); /* zero bytes in the middle, as the real one has */
    snprintf(handle->reserved + 4, 60, "/proc/%d/fd/%d", (int)getpid(), m->fd);
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    NEEDS_CONTEXT;
    char own[32];
    snprintf(own, sizeof own, "/proc/%d/", (int)getpid());
    const char *path = handle.reserved + 4;
    if (flags != 1) return CUDA_ERROR_INVALID_VALUE;
    if (handle.reserved[63] || !strncmp(path, own, strlen(own))) return CUDA_ERROR_INVALID_CONTEXT;
    for (int i = 0; i < MAX_MEMORY; i++)
        if (memories[i].base && memories[i].is_foreign && !strcmp(memories[i].name, path)) {
            memories[i].refs++;
            *address = (CUdeviceptr)(uintptr_t)memories[i].base;
            return CUDA_SUCCESS;
        }
    struct stat status;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status)) return CUDA_ERROR_INVALID_HANDLE;
    struct memory *m = map(fd, (size_t)status.st_size);
    if (!m) return CUDA_ERROR_INVALID_HANDLE;
    m->is_foreign = 1, stand_in_num_mapped++;
    strcpy(m->name, path);
    *address = (CUdeviceptr)(uintptr_t)m->base;
    return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    NEEDS_CONTEXT;
    struct memory *m = find(address, 1);
    if (!m || !m->is_foreign || (CUdeviceptr)(uintptr_t)m->base != address) return CUDA_ERROR_INVALID_HANDLE;
    if (--m->refs) return CUDA_SUCCESS;
    munmap(m->base, m->size), close(m->fd);
    m->base = NULL, stand_in_num_mapped--;
    return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    NEEDS_CONTEXT;
    if (flags != 1 || priority >= 0) return CUDA_ERROR_INVALID_VALUE;
    *stream = calloc(1, sizeof **stream), stand_in_num_streams++;
    return CUDA_SUCCESS;
}
static void carry_out(CUstream stream, struct copy *upto) {
    while (upto && stream->first) {
        struct copy *c = stream->first;
        memmove((void *)(uintptr_t)c->dst, (void *)(uintptr_t)c->src, c->size);
        stream->first = c->next;
        if (!stream->first) stream->last = NULL;
        int is_last = c == upto;
        free(c);
        if (is_last) break;
    }
}
CUresult cuStreamDestroy(CUstream stream) {
    NEEDS_CONTEXT;
    if (stream->first) return CUDA_ERROR_NOT_READY; /* the driver would let it finish */
    free(stream), stand_in_num_streams--;
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags != 2) return CUDA_ERROR_INVALID_VALUE;
    *event = calloc(1, sizeof **event), stand_in_num_events++;
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    NEEDS_CONTEXT;
    event->stream = stream, event->upto = stream->last, event->at_us = now_us() + DELAY_US;
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
    if (now_us() < event->at_us) return CUDA_ERROR_NOT_READY;
    int is_there = 0; /* copies behind another event may have been carried out already */
    for (struct copy *c = event->stream->first; c; c = c->next) is_there |= c == event->upto;
    if (!event->is_done && is_there) carry_out(event->stream, event->upto);
    event->is_done = 1;
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    NEEDS_CONTEXT;
    free(event), stand_in_num_events--;
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
    NEEDS_CONTEXT;
    if (!find(dst, size) || !find(src, size)) return CUDA_ERROR_INVALID_VALUE;
    struct copy *c = malloc(sizeof *c);
    c->dst = dst, c->src = src, c->size = size, c->next = NULL;
    if (stream->last) stream->last->next = c; else stream->first = c;
    stream->last = c;
    return CUDA_SUCCESS;
}
/* Which kernel it is, the module knows: the stand-in does what the PTX of that name states. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    NEEDS_CONTEXT;
    if (!BATCH) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    if (!strstr(image, ".entry copy_runs(")) return CUDA_ERROR_INVALID_VALUE;
    *module = (CUmodule)(uintptr_t)0x7f1123456789ULL, stand_in_num_modules++;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
    NEEDS_CONTEXT;
    stand_in_num_modules--;
    return module == (CUmodule)(uintptr_t)0x7f1123456789ULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    if (module != (CUmodule)(uintptr_t)0x7f1123456789ULL || strcmp(name, "copy_runs")) return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)(uintptr_t)0x7f2123456789ULL;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                        void **extra) {
    NEEDS_CONTEXT;
    const CUdeviceptr *runs = parameters[0];
    unsigned count = *(unsigned *)parameters[1], parts = *(unsigned *)parameters[2];
    if (function != (CUfunction)(uintptr_t)0x7f2123456789ULL || !grid_x || grid_x > 8 || grid_y != 1 || grid_z != 1 ||
        block_x != 1024 || block_y != 1 || block_z != 1 || shared || !stream || extra || !count || count > 1360 || !parts || parts > 8)
        return CUDA_ERROR_INVALID_VALUE;
    stand_in_num_launches++;
    for (unsigned i = 0; i < count; i++) {
        const CUdeviceptr *run = runs + 3 * i;
        if ((run[0] | run[1] | run[2]) % 16) return CUDA_ERROR_INVALID_VALUE;
        CUresult result = cuMemcpyDtoDAsync(run[1], run[0], run[2], stream);
        if (result) return result;
    }
    return CUDA_SUCCESS;
}
#if BATCH
static CUresult copy_batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                           CUmemcpyAttributes *attrs, size_t *firsts, size_t num_attrs, CUstream stream) {
    if (!count || num_attrs != 1 || firsts[0] || attrs[0].srcAccessOrder != 1 || attrs[0].flags != 1 || !stream)
        return CUDA_ERROR_INVALID_VALUE;
    stand_in_num_batches++;
    for (size_t i = 0; i < count; i++) {
        CUresult result = cuMemcpyDtoDAsync(dsts[i], srcs[i], sizes[i], stream);
        if (result) return result;
    }
    return CUDA_SUCCESS;
}
#if BATCH == 13
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attrs, size_t *firsts, size_t num_attrs, CUstream stream) {
    return copy_batch(dsts, srcs, sizes, count, attrs, firsts, num_attrs, stream);
}
#else
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attrs, size_t *firsts, size_t num_attrs, size_t *wrong,
                            CUstream stream) {
    *wrong = SIZE_MAX;
    return copy_batch(dsts, srcs, sizes, count, attrs, firsts, num_attrs, stream);
}
#endif
#endif
void stand_in_free_all(void) {
    for (int i = 0; i < MAX_MEMORY; i++)
        if (memories[i].base && !memories[i].is_foreign) {
            munmap(memories[i].base, memories[i].size), close(memories[i].fd);
            memories[i].base = NULL;
        }
}
CUresult cuGetErrorName(CUresult error, const char **name) {
    static char text[32];
    snprintf(text, sizeof text, "STAND_IN_%d", (int)error);
    *name = text;
    return CUDA_SUCCESS;
}
