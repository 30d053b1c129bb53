/* Launches the kernels of a recording in one call; see modular_kernel/replay/launch/cuda_replay.py.
 *
 *     recorded = pack(device, num_inputs, launches, slots, word_offsets, values, owner)
 *     replay(recorded, stream, [pointer of each input])
 *
 * values: the parameters of all launches, as words of eight bytes.
 * word_offsets: the first word of each parameter.
 * slots: (parameter, input, offset, is_map). A replay sets the parameter to the pointer of the input
 *     plus `offset` bytes, or writes this address into the TMA map that the parameter is.
 * owner: a reference that keeps the kernels loaded.
 *
 * The driver needs two to four microseconds per launch, and little more for a graph of many
 * launches. A recording of several launches is therefore turned into a graph, whose nodes are
 * updated when pointers change. On a stream that is being captured, it is replayed launch by launch
 * instead, as nodes of the caller's graph.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define MAX_INPUTS 64 /* bits of Launch.input_mask */
#define MAP_ALIGNMENT 128 /* bytes, for a CUtensorMap; CUDA 12 requires 64 */

typedef struct {
  unsigned long long function; /* a CUfunction */
  unsigned grid[3], threads, shared, dependent, cooperative;
  unsigned first, count; /* its parameters: [first, first + count) */
  uint64_t input_mask;   /* bit i: the launch has a slot for input i */
  CUgraphNode node;
} Launch;

typedef struct {
  unsigned parameter, input, is_map;
  unsigned long long offset;
} Slot;

typedef struct {
  PyObject *owner;
  int device;
  unsigned inputs, launches, slots, parameters;
  Launch *launch;
  Slot *slot;
  void *memory; /* allocation of the values */
  void **parameter; /* address of each value */
  pthread_mutex_t lock; /* guards all following fields, and the values in slots */
  int can_be_graph;
  CUgraph graph;
  CUgraphExec exec;
  uint64_t graph_pointers[MAX_INPUTS]; /* pointers that `exec` currently uses */
} RecordedCall;

/* Functions of the driver, loaded by name so that the module is not linked against a driver. */
static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*error_string)(CUresult, const char **);
static CUresult (*get_context)(CUcontext *);
static CUresult (*set_context)(CUcontext);
static CUresult (*retain_context)(CUcontext *, CUdevice);
static CUresult (*get_device)(CUdevice *, int);
static CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);
static CUresult (*graph_create)(CUgraph *, unsigned);
static CUresult (*graph_add_kernel)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t,
                                    const CUDA_KERNEL_NODE_PARAMS *);
static CUresult (*graph_add_edges)(CUgraph, const CUgraphNode *, const CUgraphNode *,
                                   const CUgraphEdgeData *, size_t);
static CUresult (*graph_instantiate)(CUgraphExec *, CUgraph, unsigned long long);
static CUresult (*graph_launch)(CUgraphExec, CUstream);
static CUresult (*graph_destroy)(CUgraph);
static CUresult (*exec_set)(CUgraphExec, CUgraphNode, const CUDA_KERNEL_NODE_PARAMS *);
static CUresult (*exec_destroy)(CUgraphExec);
static CUresult (*replace_address)(CUtensorMap *, void *);

static const struct {
  const char *name;
  void **function;
} SYMBOLS[] = {
    {"cuLaunchKernelEx", (void **)&launch_kernel},
    {"cuGetErrorString", (void **)&error_string},
    {"cuCtxGetCurrent", (void **)&get_context},
    {"cuCtxSetCurrent", (void **)&set_context},
    {"cuDevicePrimaryCtxRetain", (void **)&retain_context},
    {"cuDeviceGet", (void **)&get_device},
    {"cuStreamIsCapturing", (void **)&is_capturing},
    {"cuGraphCreate", (void **)&graph_create},
    {"cuGraphAddKernelNode_v2", (void **)&graph_add_kernel},
    {"cuGraphAddDependencies_v2", (void **)&graph_add_edges},
    {"cuGraphInstantiateWithFlags", (void **)&graph_instantiate},
    {"cuGraphLaunch", (void **)&graph_launch},
    {"cuGraphDestroy", (void **)&graph_destroy},
    {"cuGraphExecKernelNodeSetParams_v2", (void **)&exec_set},
    {"cuGraphExecDestroy", (void **)&exec_destroy},
    {"cuTensorMapReplaceAddress", (void **)&replace_address},
};

static void drop_graph(RecordedCall *recorded) {
  if (recorded->exec)
    exec_destroy(recorded->exec);
  if (recorded->graph)
    graph_destroy(recorded->graph);
  recorded->exec = NULL;
  recorded->graph = NULL;
}

static void free_recorded(PyObject *capsule) {
  RecordedCall *recorded = PyCapsule_GetPointer(capsule, "recorded");
  drop_graph(recorded);
  pthread_mutex_destroy(&recorded->lock);
  Py_DECREF(recorded->owner);
  PyMem_Free(recorded->launch);
  PyMem_Free(recorded->slot);
  PyMem_Free(recorded->memory);
  PyMem_Free(recorded->parameter);
  PyMem_Free(recorded);
}

/* Sets the address of each parameter. `values` has `words` words. */
static int set_parameter_addresses(RecordedCall *recorded, PyObject *word_offsets, uint64_t *values,
                                   Py_ssize_t words) {
  for (unsigned i = 0; i < recorded->parameters; ++i) {
    Py_ssize_t word = PyLong_AsSsize_t(PyList_GET_ITEM(word_offsets, i));
    if (word == -1 && PyErr_Occurred())
      return 0;
    if (word < 0 || word >= words) {
      PyErr_Format(PyExc_ValueError, "got a parameter at word %zd, need one of %zd words", word, words);
      return 0;
    }
    recorded->parameter[i] = values + word;
  }
  return 1;
}

static int parse_launches_and_slots(RecordedCall *recorded, PyObject *launches, PyObject *slots) {
  for (unsigned i = 0; i < recorded->launches; ++i) {
    Launch *l = recorded->launch + i;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(launches, i), "K(III)IIIIII", &l->function, &l->grid[0],
                          &l->grid[1], &l->grid[2], &l->threads, &l->shared, &l->dependent,
                          &l->cooperative, &l->first, &l->count))
      return 0;
    if (l->first > recorded->parameters || l->count > recorded->parameters - l->first) {
      PyErr_Format(PyExc_ValueError, "a launch has parameters beyond the %u given", recorded->parameters);
      return 0;
    }
    if (l->cooperative)
      recorded->can_be_graph = 0;
  }
  for (unsigned i = 0; i < recorded->slots; ++i) {
    Slot *s = recorded->slot + i;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(slots, i), "IIKI", &s->parameter, &s->input, &s->offset,
                          &s->is_map))
      return 0;
    if (s->parameter >= recorded->parameters || s->input >= recorded->inputs) {
      PyErr_Format(PyExc_ValueError, "a slot has parameter %u of %u, input %u of %u", s->parameter,
                   recorded->parameters, s->input, recorded->inputs);
      return 0;
    }
    for (unsigned j = 0; j < recorded->launches; ++j) {
      Launch *l = recorded->launch + j;
      if (s->parameter >= l->first && s->parameter - l->first < l->count)
        l->input_mask |= (uint64_t)1 << s->input;
    }
  }
  return 1;
}

static PyObject *pack(PyObject *self, PyObject *args) {
  int device;
  unsigned inputs;
  PyObject *launches, *slots, *word_offsets, *owner;
  const char *values;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "iIO!O!O!y#O", &device, &inputs, &PyList_Type, &launches,
                        &PyList_Type, &slots, &PyList_Type, &word_offsets, &values, &bytes, &owner))
    return NULL;
  if (inputs > MAX_INPUTS)
    return PyErr_Format(PyExc_ValueError, "%u inputs: at most %d", inputs, MAX_INPUTS);
  RecordedCall *recorded = PyMem_Calloc(1, sizeof(RecordedCall));
  if (!recorded)
    return PyErr_NoMemory();
  *recorded = (RecordedCall){.owner = owner, .device = device, .inputs = inputs, .can_be_graph = 1};
  PyObject *capsule = PyCapsule_New(recorded, "recorded", free_recorded);
  if (!capsule) {
    PyMem_Free(recorded);
    return NULL;
  }
  Py_INCREF(owner);
  pthread_mutex_init(&recorded->lock, NULL);
  recorded->launches = PyList_GET_SIZE(launches);
  recorded->slots = PyList_GET_SIZE(slots);
  recorded->parameters = PyList_GET_SIZE(word_offsets);
  recorded->launch = PyMem_Calloc(recorded->launches + 1, sizeof(Launch));
  recorded->slot = PyMem_Calloc(recorded->slots + 1, sizeof(Slot));
  recorded->memory = PyMem_Calloc(bytes + MAP_ALIGNMENT, 1);
  recorded->parameter = PyMem_Calloc(recorded->parameters + 1, sizeof(void *));
  if (!recorded->launch || !recorded->slot || !recorded->memory || !recorded->parameter) {
    Py_DECREF(capsule);
    return PyErr_NoMemory();
  }
  uintptr_t aligned = ((uintptr_t)recorded->memory + MAP_ALIGNMENT - 1) & ~(uintptr_t)(MAP_ALIGNMENT - 1);
  memcpy((void *)aligned, values, bytes);
  if (!set_parameter_addresses(recorded, word_offsets, (uint64_t *)aligned, bytes / 8) ||
      !parse_launches_and_slots(recorded, launches, slots)) {
    Py_DECREF(capsule);
    return NULL;
  }
  return capsule;
}

/* Makes the primary context of the device current: a thread that has not used it has none. */
static CUresult ensure_context(int ordinal) {
  CUcontext context = NULL;
  CUdevice device;
  CUresult result = get_context(&context);
  if (result != CUDA_SUCCESS || context)
    return result;
  if ((result = get_device(&device, ordinal)) != CUDA_SUCCESS)
    return result;
  if ((result = retain_context(&context, device)) != CUDA_SUCCESS)
    return result;
  return set_context(context);
}

static CUresult launch(const Launch *l, CUstream stream, void **parameters) {
  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {.gridDimX = l->grid[0],
                           .gridDimY = l->grid[1],
                           .gridDimZ = l->grid[2],
                           .blockDimX = l->threads,
                           .blockDimY = 1,
                           .blockDimZ = 1,
                           .sharedMemBytes = l->shared,
                           .hStream = stream,
                           .attrs = attributes};
  if (l->dependent) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (l->cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  return launch_kernel(&config, (CUfunction)(uintptr_t)l->function, parameters, NULL);
}

static CUresult launch_all(RecordedCall *recorded, CUstream stream) {
  CUresult result = CUDA_SUCCESS;
  for (unsigned i = 0; i < recorded->launches && result == CUDA_SUCCESS; ++i)
    result = launch(recorded->launch + i, stream, recorded->parameter + recorded->launch[i].first);
  return result;
}

static CUDA_KERNEL_NODE_PARAMS make_node_params(const RecordedCall *recorded, const Launch *l) {
  return (CUDA_KERNEL_NODE_PARAMS){.func = (CUfunction)(uintptr_t)l->function,
                                   .gridDimX = l->grid[0],
                                   .gridDimY = l->grid[1],
                                   .gridDimZ = l->grid[2],
                                   .blockDimX = l->threads,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .sharedMemBytes = l->shared,
                                   .kernelParams = recorded->parameter + l->first};
}

/* Builds a graph of the kernels in sequence. With programmatic dependent launch, a kernel starts when
 * its predecessor permits it. */
static CUresult build_graph(RecordedCall *recorded) {
  CUresult result = graph_create(&recorded->graph, 0);
  for (unsigned i = 0; i < recorded->launches && result == CUDA_SUCCESS; ++i) {
    Launch *l = recorded->launch + i;
    CUDA_KERNEL_NODE_PARAMS parameters = make_node_params(recorded, l);
    result = graph_add_kernel(&l->node, recorded->graph, NULL, 0, &parameters);
    if (i == 0 || result != CUDA_SUCCESS)
      continue;
    CUgraphEdgeData edge = {0};
    if (l->dependent) {
      edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
      edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    }
    result = graph_add_edges(recorded->graph, &recorded->launch[i - 1].node, &l->node, &edge, 1);
  }
  if (result == CUDA_SUCCESS)
    result = graph_instantiate(&recorded->exec, recorded->graph, 0);
  return result;
}

/* Updates the nodes of kernels that use changed pointers. */
static CUresult update_graph(RecordedCall *recorded, const uint64_t *pointers) {
  uint64_t changed = 0;
  for (unsigned i = 0; i < recorded->inputs; ++i)
    if (recorded->graph_pointers[i] != pointers[i])
      changed |= (uint64_t)1 << i;
  CUresult result = CUDA_SUCCESS;
  for (unsigned i = 0; changed && i < recorded->launches && result == CUDA_SUCCESS; ++i) {
    const Launch *l = recorded->launch + i;
    CUDA_KERNEL_NODE_PARAMS parameters = make_node_params(recorded, l);
    if (l->input_mask & changed)
      result = exec_set(recorded->exec, l->node, &parameters);
  }
  return result;
}

/* Returns whether `exec` is now a graph with these pointers. After a failure, it is never tried
 * again. */
static int update_or_build_graph(RecordedCall *recorded, const uint64_t *pointers) {
  if (recorded->can_be_graph) {
    CUresult result = recorded->exec ? update_graph(recorded, pointers) : build_graph(recorded);
    memcpy(recorded->graph_pointers, pointers, sizeof(*pointers) * recorded->inputs);
    if (result != CUDA_SUCCESS) {
      drop_graph(recorded);
      recorded->can_be_graph = 0;
    }
  }
  return recorded->can_be_graph;
}

static CUresult replay_locked(RecordedCall *recorded, CUstream stream, const uint64_t *pointers) {
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  CUresult result = ensure_context(recorded->device);
  if (result != CUDA_SUCCESS)
    return result;
  for (unsigned i = 0; i < recorded->slots && result == CUDA_SUCCESS; ++i) {
    const Slot *s = recorded->slot + i;
    uint64_t pointer = pointers[s->input] + s->offset;
    if (s->is_map)
      result = replace_address(recorded->parameter[s->parameter], (void *)(uintptr_t)pointer);
    else
      memcpy(recorded->parameter[s->parameter], &pointer, sizeof(pointer));
  }
  if (result != CUDA_SUCCESS)
    return result;
  /* If the query fails, a capture on another stream forbids it; do not launch a graph. */
  if (recorded->launches > 1 && is_capturing(stream, &capturing) == CUDA_SUCCESS &&
      capturing == CU_STREAM_CAPTURE_STATUS_NONE && update_or_build_graph(recorded, pointers))
    return graph_launch(recorded->exec, stream);
  return launch_all(recorded, stream);
}

static PyObject *replay(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  uint64_t pointers[MAX_INPUTS];
  if (count != 3 || !PyList_Check(args[2]))
    return PyErr_Format(PyExc_TypeError, "replay(recorded, stream, [pointer, ...])");
  RecordedCall *recorded = PyCapsule_GetPointer(args[0], "recorded");
  if (!recorded)
    return NULL;
  uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
  if (PyList_GET_SIZE(args[2]) != recorded->inputs)
    return PyErr_Format(PyExc_ValueError, "%zd pointers for %u inputs", PyList_GET_SIZE(args[2]),
                        recorded->inputs);
  for (unsigned i = 0; i < recorded->inputs; ++i)
    pointers[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[2], i));
  if (PyErr_Occurred())
    return NULL;
  CUresult result;
  Py_BEGIN_ALLOW_THREADS; /* a launch on a full stream blocks */
  pthread_mutex_lock(&recorded->lock);
  result = replay_locked(recorded, (CUstream)(uintptr_t)stream, pointers);
  pthread_mutex_unlock(&recorded->lock);
  Py_END_ALLOW_THREADS;
  if (result == CUDA_SUCCESS)
    Py_RETURN_NONE;
  const char *text = "unknown error";
  error_string(result, &text);
  return PyErr_Format(PyExc_RuntimeError, "CUDA error in a replayed launch: %s", text);
}

static PyMethodDef methods[] = {{"pack", pack, METH_VARARGS, NULL},
                                {"replay", (PyCFunction)(void (*)(void))replay, METH_FASTCALL, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "modular_kernel_replay", NULL, -1,
                                        methods};

PyMODINIT_FUNC PyInit_modular_kernel_replay(void) {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (!library)
    return PyErr_Format(PyExc_ImportError, "no libcuda.so.1");
  for (unsigned i = 0; i < sizeof(SYMBOLS) / sizeof(*SYMBOLS); ++i)
    if (!(*SYMBOLS[i].function = dlsym(library, SYMBOLS[i].name)))
      return PyErr_Format(PyExc_ImportError, "no %s in libcuda.so.1", SYMBOLS[i].name);
  return PyModule_Create(&definition);
}
