// A device that torch takes for an XPU and whose memory is RAM: every operator runs on the CPU, over the same bytes.
//
// So its results are the CPU's bit for bit, while torch does all that it does for a GPU: it refuses operators on mixed
// devices, runs backward on a thread of its own, and makes gradients where the forward computed. It is an XPU and not a
// PrivateUse1 device because torch swaps the data of a parameter (`p.data = other`) between CPU and XPU as between CPU
// and CUDA, and refuses PrivateUse1 (TensorImpl::has_compatible_shallow_copy_type).

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::XPU;
bool is_visible = false;  // to torch.accelerator

// -- memory and device -------------------------------------------------------------------------------------------------

void free_memory(void* memory) { std::free(memory); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes ? std::aligned_alloc(64, (nbytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &free_memory, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
Memory memory;

// One device with one stream, which is always empty: operators have ended when they return.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, 0)); }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(XPU, Guard);

struct Hooks final : at::XPUHooksInterface {
  void init() const override {}
  bool hasXPU() const override { return is_visible; }
  bool isBuilt() const override { return is_visible; }
  bool isAvailable() const override { return is_visible; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  c10::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
};

struct AtLoad {
  AtLoad() {
    c10::SetAllocator(kType, &memory, 1);
    at::XPUHooksRegistry()->Register("XPUHooks", [] { return std::unique_ptr<at::XPUHooksInterface>(new Hooks); });
  }
} at_load;

// -- operators ---------------------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::XPU),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::XPU),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

// The same bytes as a storage of another device, which keeps the first one alive.
c10::Storage retyped(const c10::Storage& storage, c10::DeviceType type, c10::Allocator* allocator) {
  auto* kept = new c10::Storage(storage);
  c10::DataPtr data(storage.mutable_data(), kept, &release, c10::Device(type, type == kType ? 0 : -1));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, true);
}

at::Tensor over(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.dim() == 0) made->set_wrapped_number(like.unsafeGetTensorImpl()->is_wrapped_number());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// One call on the CPU: our tensors as CPU tensors over the same memory, and what comes back as ours.
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;       // ours, the CPU's
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // ours, the CPU's
  bool has_cpu = false;

  at::Tensor to_cpu(const at::Tensor& ours) {
    if (!is_ours(ours)) {
      has_cpu |= ours.defined() && ours.dim() > 0;
      return ours;
    }
    for (auto& [known, cpu] : tensors)
      if (known.is_same(ours)) return cpu;
    c10::Storage host;
    for (auto& [known, cpu] : storages)
      if (known.is_alias_of(ours.storage())) host = cpu;
    if (!host) {
      host = retyped(ours.storage(), c10::DeviceType::CPU, c10::GetAllocator(c10::DeviceType::CPU));
      storages.emplace_back(ours.storage(), host);
    }
    tensors.emplace_back(ours, over(host, ours, c10::DispatchKey::CPU));
    return tensors.back().second;
  }

  at::Tensor to_ours(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu() || result.layout() != c10::kStrided) return result;
    for (auto& [ours, cpu] : tensors)
      if (cpu.is_same(result)) return ours;
    for (auto& [ours, cpu] : storages)
      if (cpu.is_alias_of(result.storage())) return over(ours, result, c10::DispatchKey::XPU);
    return over(retyped(result.storage(), kType, &memory), result, c10::DispatchKey::XPU);
  }

  // After the call: what an operator has resized, or given other memory, in place.
  void carry_back() {
    for (auto& [ours, cpu] : storages) {
      if (cpu.data() == ours.data() && cpu.nbytes() == ours.nbytes()) continue;
      auto fresh = retyped(cpu, kType, &memory);
      ours.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh.mutable_data_ptr()));
      ours.unsafeGetStorageImpl()->set_nbytes(cpu.nbytes());
    }
    for (auto& [ours, cpu] : tensors)
      if (ours.sizes() != cpu.sizes() || ours.strides() != cpu.strides() ||
          ours.storage_offset() != cpu.storage_offset())
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
};

// What takes tensors of both devices on a GPU too.
const std::set<std::string> mixed = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                     "aten::_pack_padded_sequence"};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = call.to_cpu(tensor);
      value = c10::IValue(list);
    } else if (value.isList() && schema.arguments()[i - first].type()->str().find("Tensor?") != std::string::npos) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : value.toListRef())
        list.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(call.to_cpu(item.toTensor())));
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator()) {
      value = c10::IValue();
    }
  }
  TORCH_CHECK(call.tensors.empty() || !call.has_cpu || mixed.count(op.operator_name().name),
              "Expected all tensors to be on the same device, but found at least two devices, xpu:0 and cpu! (",
              op.operator_name().name, ")");
  op.callBoxed(stack);
  call.carry_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_ours(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = call.to_ours(tensor);
      value = c10::IValue(list);
    }
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  Call call;
  call.to_cpu(self).copy_(call.to_cpu(source));
  return self;
}

at::Tensor& set_range(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                      c10::IntArrayRef stride) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(std::move(source));
  made->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_range(self, std::move(source), 0, count, 1);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_range(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  Call call;
  return call.to_cpu(tensor).item();
}

// The choice that torch makes by a table of kernels with no place for ours; then the CPU's kernels, by their operators.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  Call call;
  std::optional<at::Tensor> cpu_mask, bias = mask;
  if (mask) cpu_mask = call.to_cpu(*mask);
  const auto choice = at::_fused_sdp_choice(call.to_cpu(query), call.to_cpu(key), call.to_cpu(value), cpu_mask,
                                            dropout_p, is_causal, scale, enable_gqa);
  if (mask && mask->scalar_type() == at::kBool)
    bias = at::zeros_like(*mask, query.options()).masked_fill_(mask->logical_not(), -INFINITY);
  if (choice == static_cast<int64_t>(at::SDPBackend::flash_attention))
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, bias, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout_p, is_causal,
                                                            std::nullopt, scale, enable_gqa));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, XPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, XPU, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_range);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  // Composites that would look for a kernel of the device's own.
  for (const char* name : {"convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, AutogradXPU, m) { m.impl("scaled_dot_product_attention", attention); }
TORCH_LIBRARY_IMPL(aten, XPU, n) { n.impl("scaled_dot_product_attention", attention); }

extern "C" void fake_gpu_show(bool is_shown) { is_visible = is_shown; }
