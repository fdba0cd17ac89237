/* A PJRT plugin that stands for libtpu on a machine without a TPU.
 *
 * It forwards every call to XLA's plugin for the CPU, whose path is in STAND_IN_PLUGIN. It drops
 * the options of libtpu from the creation of the client, and counts copies to the host.
 *
 *     gcc -shared -fPIC -I FOLDER_OF_THE_HEADER pjrt_stand_in.c -o stand_in.so -ldl
 *     TPU_LIBRARY_PATH=stand_in.so STAND_IN_PLUGIN=pjrt_c_api_cpu_plugin.so python train.py
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "pjrt_c_api.h"

static PJRT_Api* table;
static PJRT_Error* (*create)(PJRT_Client_Create_Args*);
static PJRT_Error* (*to_host)(PJRT_Buffer_ToHostBuffer_Args*);
static long copies;

long stand_in_host_copies(void) { return copies; }

static PJRT_Error* count_copy(PJRT_Buffer_ToHostBuffer_Args* args) {
  if (args->dst) __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED); /* without: it asks for the size */
  return to_host(args);
}

static PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  PJRT_NamedValue devices;
  memset(&devices, 0, sizeof devices);
  devices.struct_size = PJRT_NamedValue_STRUCT_SIZE;
  devices.name = "cpu_device_count";
  devices.name_size = strlen(devices.name);
  devices.type = PJRT_NamedValue_kInt64;
  devices.int64_value = 1;
  devices.value_size = 1;
  args->create_options = &devices;
  args->num_options = 1;
  return create(args);
}

const PJRT_Api* GetPjrtApi(void) {
  if (table) return table;
  void* plugin = dlopen(getenv("STAND_IN_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  if (!plugin) {
    fprintf(stderr, "%s\n", dlerror());
    return NULL;
  }
  const PJRT_Api* real = ((const PJRT_Api* (*)(void))dlsym(plugin, "GetPjrtApi"))();
  table = malloc(real->struct_size); /* a newer plugin's table may be longer than our header's */
  memcpy(table, real, real->struct_size);
  create = real->PJRT_Client_Create;
  to_host = real->PJRT_Buffer_ToHostBuffer;
  table->PJRT_Client_Create = create_client;
  table->PJRT_Buffer_ToHostBuffer = count_copy;
  return table;
}
