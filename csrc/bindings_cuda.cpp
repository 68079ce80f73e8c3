// The module autoshard._native_cuda: kernels that run on CUDA.  Nothing here waits for the device;
// `stream` is the handle of the stream that the tensors belong to.

#include <stdexcept>
#include <string>

#include "bindings.h"

namespace py = pybind11;
using namespace autoshard;

namespace {

void check(int error) {
  if (error != 0) throw std::runtime_error(std::string("CUDA kernel: ") + cuda_error_text(error));
}

void forward(Address x, Address residual, Address weight, Address bias, Address y, Address s,
             Address mean, Address rstd, int64_t rows, int64_t hidden, int dtype,
             int parameter_dtype, double eps, Address stream) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  check(add_norm_forward_cuda(
      forward_of(x, residual, weight, bias, y, s, mean, rstd, shape, eps), pointer(stream)));
}

void backward(Address dy, Address ds, Address s, Address mean, Address rstd, Address weight,
              Address dresidual, Address dweight, Address dbias, int64_t rows, int64_t hidden,
              int dtype, int parameter_dtype, Address stream, Address workspace) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  check(add_norm_backward_cuda(
      backward_of(dy, ds, s, mean, rstd, weight, dresidual, dweight, dbias, shape),
      pointer<float>(workspace), pointer(stream)));
}

void dropout(Address x, Address y, int64_t runs, int64_t run, int dtype, Address stream,
             const Dropout& keys) {
  check(dropout_cuda(dropout_of(x, y, runs, run, dtype, keys), pointer(stream)));
}

void dropout_forward(Address x, Address residual, Address weight, Address bias, Address y,
                     Address s, Address mean, Address rstd, int64_t rows, int64_t hidden, int dtype,
                     int parameter_dtype, double eps, Address stream, Address input_bias,
                     const Dropout& dropout) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  NormForward args = forward_of(x, residual, weight, bias, y, s, mean, rstd, shape, eps);
  args.input_bias = pointer(input_bias);
  args.dropout = &dropout;
  check(add_norm_forward_cuda(args, pointer(stream)));
}

void dropout_backward(Address dy, Address ds, Address s, Address mean, Address rstd, Address weight,
                      Address dresidual, Address dweight, Address dbias, int64_t rows,
                      int64_t hidden, int dtype, int parameter_dtype, Address stream,
                      Address workspace, Address dx, Address dinput_bias, const Dropout& dropout) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  NormBackward args =
      backward_of(dy, ds, s, mean, rstd, weight, dresidual, dweight, dbias, shape);
  args.dx = pointer(dx);
  args.dinput_bias = pointer(dinput_bias);
  args.dropout = &dropout;
  check(add_norm_backward_cuda(args, pointer<float>(workspace), pointer(stream)));
}

int64_t workspace(int64_t rows, int64_t hidden, int dtype) {
  return workspace_floats(shape_of(rows, hidden, dtype, dtype));
}

}  // namespace

PYBIND11_MODULE(_native_cuda, module) {
  module.doc() = "Kernels of autoshard that run on CUDA.";
  define_dropout(module);
  using release = py::call_guard<py::gil_scoped_release>;
  module.def("add_norm_forward", &forward, release());
  module.def("add_norm_backward", &backward, release());
  module.def("dropout", &dropout, release());
  module.def("dropout_add_norm_forward", &dropout_forward, release());
  module.def("dropout_add_norm_backward", &dropout_backward, release());
  module.def("workspace_floats", &workspace);
  module.def("architectures", [] { return AUTOSHARD_ARCHITECTURES; });
}
