// SPDX-License-Identifier: Apache-2.0
// A substitute for libcuda.so.1 that suffices to load torch on a machine without a driver.
// Functions that torch looks up but does not call return a "not supported" error.
#define KV_DRIVER_API extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kNotSupported = 801;
constexpr int kVersion = 13000;
char context;
}  // namespace

KV_DRIVER_API int cuInit(unsigned) { return 0; }
KV_DRIVER_API int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
KV_DRIVER_API int cuDriverGetVersion(int* version) {
  *version = kVersion;
  return 0;
}
KV_DRIVER_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
KV_DRIVER_API int cuCtxGetCurrent(void** current) {
  *current = &context;
  return 0;
}
KV_DRIVER_API int cuGetErrorString(int, const char** text) {
  *text = "the driver's functions are not simulated";
  return 0;
}

#define KV_UNSUPPORTED(name) \
  KV_DRIVER_API int name() { return kNotSupported; }
KV_UNSUPPORTED(cuCtxSetCurrent)
KV_UNSUPPORTED(cuDeviceGet)
KV_UNSUPPORTED(cuDeviceGetAttribute)
KV_UNSUPPORTED(cuDevicePrimaryCtxRetain)
KV_UNSUPPORTED(cuFuncGetAttribute)
KV_UNSUPPORTED(cuFuncSetAttribute)
KV_UNSUPPORTED(cuFuncSetCacheConfig)
KV_UNSUPPORTED(cuLaunchCooperativeKernel)
KV_UNSUPPORTED(cuLaunchKernel)
KV_UNSUPPORTED(cuLinkAddData_v2)
KV_UNSUPPORTED(cuLinkComplete)
KV_UNSUPPORTED(cuLinkCreate_v2)
KV_UNSUPPORTED(cuModuleGetFunction)
KV_UNSUPPORTED(cuModuleLoad)
KV_UNSUPPORTED(cuModuleLoadData)
KV_UNSUPPORTED(cuModuleLoadDataEx)
KV_UNSUPPORTED(cuModuleUnload)
KV_UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
KV_UNSUPPORTED(cuPointerGetAttribute)
KV_UNSUPPORTED(cuTensorMapEncodeTiled)
