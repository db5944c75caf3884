// A stand-in for an accelerator: a device whose memory is the host's, but whose tensors do not mix with the CPU's.
// Operators run as the CPU's on copies. Copies between host and device are counted, apart from those that running an
// operator takes, which a real accelerator would not make.

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace {

const c10::Device device(c10::DeviceType::PrivateUse1, 0);
const c10::Stream now(c10::Stream::DEFAULT, device);
std::atomic<int64_t> to_device{0}, to_host{0}, reads{0}, waits{0};
thread_local int in_operator = 0;
std::atomic<bool> has_float64{true};

// Some accelerators have no double precision.
at::ScalarType checked(at::ScalarType type) {
  TORCH_CHECK(has_float64 || type != at::kDouble || in_operator, "this device has no float64");
  return type;
}

struct Inside {
  Inside() { ++in_operator; }
  ~Inside() { --in_operator; }
};

void count(std::atomic<int64_t>& what) {
  if (in_operator == 0) ++what;
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  // Autograd would start a thread per device, but only before its first backward pass in this process; with none, and
  // with multithreading switched off (stand_in.py), it works in the thread that calls it.
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  // Everything is done at once, so that there is nothing to wait for.
  c10::Stream getStream(c10::Device) const noexcept override { return now; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return now; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

using Number = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<at::Device>;
using Flag = std::optional<bool>;
constexpr c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, Number number, Layout, Where, Flag, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, key, checked(c10::dtype_or_default(number)), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Number number, Layout, Where, Flag) {
  return at::detail::empty_strided_generic(size, stride, &allocator, key, checked(c10::dtype_or_default(number)));
}

// The same memory as a tensor of the CPU.
at::Tensor seen_by_cpu(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.is_cpu() && !to.is_cpu()) count(to_device);
  if (!from.is_cpu() && to.is_cpu()) count(to_host);
  Inside inside;
  seen_by_cpu(to).copy_(seen_by_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& t) {
  count(reads);
  Inside inside;
  return seen_by_cpu(t).item();
}

// Whether a real accelerator would have to wait for a result before the host can go on.
bool host_waits(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::set<std::string> waiting = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::is_nonzero",
      "aten::unique_consecutive", "aten::bincount"};
  const auto& name = op.schema().name();
  if (waiting.count(name)) return true;
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_") return false;
  const auto& which = stack[stack.size() - op.schema().arguments().size() + 1];
  if (!which.isList()) return false;
  for (const c10::IValue& each : which.toListRef())
    if (each.isTensor() && each.toTensor().defined() && each.toTensor().scalar_type() == at::kBool) return true;
  return false;
}

void refuse_cpu(const c10::OperatorHandle& op, const at::Tensor& t) {
  // A number in a tensor without axes may come from anywhere, as with other accelerators.
  TORCH_CHECK(
      !t.defined() || !t.is_cpu() || t.dim() == 0, op.schema().name(), ": expected all tensors to be on the same device, ",
      "but found one on ", device, " and one on cpu");
}

// The fallback would take tensors of the CPU as they are.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (size_t k = stack.size() - op.schema().arguments().size(); k < stack.size(); ++k) {
    const c10::IValue& given = stack[k];
    if (given.isTensor()) refuse_cpu(op, given.toTensor());
    if (given.isList())
      for (const c10::IValue& each : given.toListRef())
        if (each.isTensor()) refuse_cpu(op, each.toTensor());
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (in_operator == 0) check_devices(op, *stack);
  if (in_operator == 0 && host_waits(op, *stack)) ++waits;
  Inside inside;
  at::native::cpu_fallback(op, stack);
}

// A convolution has a place of its own for backends like this one, which the fallback does not reach.
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  Inside inside;
  std::optional<at::Tensor> bias;
  if (b && b->defined()) bias = seen_by_cpu(*b);
  return at::convolution_symint(
             seen_by_cpu(x), seen_by_cpu(w), bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(device);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  Inside inside;
  std::vector<c10::SymInt> bias{transposed ? w.sym_size(1) * groups : w.sym_size(0)};
  auto [gx, gw, gb] = at::convolution_backward_symint(
      seen_by_cpu(g), seen_by_cpu(x), seen_by_cpu(w), c10::SymIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto back = [](const at::Tensor& t) { return t.defined() ? t.to(device) : t; };
  return {back(gx), back(gw), back(gb)};
}

// Its schema does not say that it changes the running statistics, so the fallback would lose them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  Inside inside;
  auto there = [](const std::optional<at::Tensor>& t) {
    return t && t->defined() ? std::optional<at::Tensor>(seen_by_cpu(*t)) : std::nullopt;
  };
  auto [y, m, v] = at::native_batch_norm(
      seen_by_cpu(x), there(weight), there(bias), there(mean), there(variance), training, momentum, eps);
  return {y.to(device), m.to(device), v.to(device)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"to_device", to_device}, {"to_host", to_host}, {"reads", reads}, {"waits", waits}};
  });
  m.def("set_float64", [](bool there) { has_float64 = there; });
}
