/* A stand-in for libcuda.so.1 with the functions that cuda_replay.c and Triton call. A "kernel" is a
 * C function, which a launch calls. Global counters count launches and other driver calls. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#define KERNEL_PARAMETERS 6 /* four arguments and two scratch pointers */
#define MAX_NODES 8

typedef void (*Kernel)(void **);
typedef struct Node {
  Kernel kernel;
  unsigned long long value[KERNEL_PARAMETERS];
  struct Node *after;
  int edge;
} Node;
typedef struct {
  Node *node[MAX_NODES];
  unsigned count;
} Graph;

int maps, launches, graph_launches, sets, instantiations, capturing, dependent_launches, fail;
unsigned long long last_stream;

static void copy_parameters(Node *node, void **parameters) {
  for (int i = 0; i < KERNEL_PARAMETERS; ++i)
    memcpy(node->value + i, parameters[i], 8);
}

static void call(Node *node) {
  void *parameters[KERNEL_PARAMETERS];
  for (int i = 0; i < KERNEL_PARAMETERS; ++i)
    parameters[i] = node->value + i;
  node->kernel(parameters);
}

/* out[i] = x[i] * factor + step, for i < count = 4 */
void scale_kernel(void **parameters) {
  float *out = *(float **)parameters[0], *x = *(float **)parameters[1];
  float factor = *(float *)parameters[2];
  int step = *(int *)parameters[3];
  for (int i = 0; i < 4; ++i)
    out[i] = x[i] * factor + step;
}

/* Arguments of launches of functions that were loaded from a module. These are not executed. */
#define MAX_LAUNCHES 8
#define MAX_BYTES 1024

typedef struct {
  unsigned grid[3], threads, shared, dependent, cooperative, other, bytes;
  unsigned long long stream;
  unsigned char value[MAX_BYTES];
} RecordedLaunch;

RecordedLaunch recorded[MAX_LAUNCHES];
int recorded_count, parameter_count, parameter_bytes[64];

static CUresult record_launch(const CUlaunchConfig *config, void **parameters) {
  RecordedLaunch *record = recorded + recorded_count++ % MAX_LAUNCHES;
  *record = (RecordedLaunch){.grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                             .threads = config->blockDimX * config->blockDimY * config->blockDimZ,
                             .shared = config->sharedMemBytes,
                             .stream = (unsigned long long)config->hStream};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    CUlaunchAttributeID id = config->attrs[i].id;
    unsigned dependent = id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    unsigned cooperative = id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    record->dependent += dependent;
    record->cooperative += cooperative;
    record->other += !dependent && !cooperative;
  }
  for (int i = 0; i < parameter_count; ++i) {
    memcpy(record->value + record->bytes, parameters[i], parameter_bytes[i]);
    record->bytes += parameter_bytes[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **e) {
  if (fail == 1)
    return CUDA_ERROR_LAUNCH_FAILED;
  if (f == (CUfunction)recorded)
    return record_launch(config, parameters);
  ++launches;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    dependent_launches +=
        config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  last_stream = (unsigned long long)config->hStream;
  ((Kernel)f)(parameters);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "launch failed, says the stand-in";
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
  *graph = (CUgraph)calloc(1, sizeof(Graph));
  return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *before,
                                 size_t count, const CUDA_KERNEL_NODE_PARAMS *parameters) {
  Graph *made = (Graph *)graph;
  Node *new = calloc(1, sizeof(Node));
  new->kernel = (Kernel)parameters->func;
  copy_parameters(new, parameters->kernelParams);
  made->node[made->count++] = new;
  *node = (CUgraphNode) new;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *edges, size_t count) {
  ((Node *)*to)->after = (Node *)*from;
  ((Node *)*to)->edge = edges->type;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  Graph *made = (Graph *)graph;
  if (fail == 2)
    return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned i = 1; i < made->count; ++i)
    if (made->node[i]->after != made->node[i - 1])
      return CUDA_ERROR_INVALID_VALUE;
  ++instantiations;
  *exec = (CUgraphExec)made;
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  Graph *made = (Graph *)exec;
  ++graph_launches;
  last_stream = (unsigned long long)stream;
  for (unsigned i = 0; i < made->count; ++i) {
    dependent_launches += made->node[i]->edge == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    call(made->node[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS *parameters) {
  ++sets;
  copy_parameters((Node *)node, parameters->kernelParams);
  return CUDA_SUCCESS;
}

/* Replaces the address, which is the first word of a tensor map, and checks the map's alignment. */
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  if ((unsigned long long)map % 128)
    return CUDA_ERROR_INVALID_VALUE;
  ++maps;
  memcpy(map, &address, sizeof(address));
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) { return CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec exec) { return CUDA_SUCCESS; }

/* The other functions that Triton's driver.c calls: modules, attributes, tensor maps. */
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)recorded;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = 1024;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

/* Writes the arguments into the tensor map, with the address first. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned long long *word = (unsigned long long *)map;
  memset(map, 0, sizeof(*map));
  word[0] = (unsigned long long)address;
  word[1] = type;
  word[2] = swizzle;
  for (unsigned i = 0; i < rank; ++i) {
    word[3 + i] = sizes[i];
    word[8 + i] = box[i];
  }
  return CUDA_SUCCESS;
}
