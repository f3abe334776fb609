// SPDX-License-Identifier: Apache-2.0
// The device "sealed", a PrivateUse1 backend whose memory the host can only access during the
// device's own copies.
//
// Each allocation is a separate mapping that is PROT_NONE except during copies by the device. Any
// other access causes SIGSEGV at the first byte. The device implements allocation, views, fills and
// copies. All other ops run on the CPU through torch's boxed fallback, which can be disabled.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

namespace {

using at::Tensor;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// The device's allocations. While a copy runs, the allocations of its tensors are accessible.
// Several threads may copy concurrently.
class Memory final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t num_bytes) override {
    const at::Device device(kType, 0);
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (num_bytes + page - 1) / page * page;
    void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sealed: out of memory");
    const std::lock_guard<std::mutex> held(mutex_);
    mappings_[at] = {size, 0};
    return {at, at, &release, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "sealed: copies of raw memory are not supported");
  }

  void open(void* at) { protect(at, 1); }
  void close(void* at) { protect(at, -1); }

 private:
  struct Mapping {
    size_t size;
    int num_open;  // number of copies that are using the mapping
  };

  static void release(void* at);

  void protect(void* at, int change) {
    const std::lock_guard<std::mutex> held(mutex_);
    Mapping& mapping = mappings_.at(at);
    mapping.num_open += change;
    const int access = mapping.num_open > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    TORCH_CHECK(mprotect(at, mapping.size, access) == 0, "sealed: mprotect failed");
  }

  std::mutex mutex_;
  std::map<void*, Mapping> mappings_;
};

Memory& memory() {
  static auto* const one = new Memory;  // never destroyed, because it must outlive every tensor
  return *one;
}

void Memory::release(void* at) {
  if (at == nullptr) return;
  const std::lock_guard<std::mutex> held(memory().mutex_);
  const auto found = memory().mappings_.find(at);
  munmap(at, found->second.size);
  memory().mappings_.erase(found);
}

// Provides a CPU tensor over the bytes of a device tensor. The bytes are accessible as long as this
// object exists.
class Opened {
 public:
  explicit Opened(const Tensor& tensor) : on_cpu(tensor) {
    if (tensor.is_cpu()) return;
    TORCH_CHECK(tensor.device().type() == kType, "sealed: no copies to or from ", tensor.device());
    base_ = tensor.storage().mutable_data();
    if (base_ != nullptr) memory().open(base_);
    char* first = static_cast<char*>(base_) + tensor.storage_offset() * tensor.element_size();
    on_cpu =
        at::from_blob(first, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  ~Opened() {
    if (base_ != nullptr) memory().close(base_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  Tensor on_cpu;

 private:
  void* base_ = nullptr;
};

int64_t num_copied_bytes = 0;
bool falls_back = true;
std::map<std::string, int64_t> fallbacks;  // number of calls of each op that ran on the CPU

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (from.numel() == 0) return to;
  num_copied_bytes += static_cast<int64_t>(from.nbytes());
  const Opened source(from), destination(to);
  destination.on_cpu.copy_(source.on_cpu);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor& zero_(Tensor& self) {
  Opened(self).on_cpu.zero_();
  return self;
}

Tensor& fill_(Tensor& self, const at::Scalar& value) {
  Opened(self).on_cpu.fill_(value);
  return self;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

// Composite operators call this operator, and torch's fallback does not cover it.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  std::optional<Tensor> bias_on_cpu;
  if (bias && bias->defined()) bias_on_cpu = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), bias_on_cpu, stride, padding, dilation,
                         transposed, output_padding, groups)
      .to(input.device());
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  ++fallbacks[name];
  TORCH_CHECK(falls_back, "sealed: the device has no ", name);
  at::native::cpu_fallback(op, stack);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(false, "sealed: there is no pinned memory");
  }
};

const bool is_registered = [] {
  c10::SetAllocator(kType, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

namespace at::detail {
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kType>);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("zero_", &zero_);
  m.impl("fill_.Scalar", &fill_);
  m.impl("convolution_overrideable", &convolution);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("num_copied_bytes", [] { return num_copied_bytes; });
  m.def("fallbacks", [] { return fallbacks; });
  m.def("set_fallback", [](bool value) { return std::exchange(falls_back, value); });
}
