// The module autoshard._native: kernels that run on the CPU.

#include "bindings.h"

namespace py = pybind11;
using namespace autoshard;

namespace {

void forward(Address x, Address residual, Address weight, Address bias, Address y, Address s,
             Address mean, Address rstd, int64_t rows, int64_t hidden, int dtype,
             int parameter_dtype, double eps, int threads) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  add_norm_forward_cpu(
      forward_of(x, residual, weight, bias, y, s, mean, rstd, shape, eps), threads);
}

void backward(Address dy, Address ds, Address s, Address mean, Address rstd, Address weight,
              Address dresidual, Address dweight, Address dbias, int64_t rows, int64_t hidden,
              int dtype, int parameter_dtype, int threads) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  add_norm_backward_cpu(
      backward_of(dy, ds, s, mean, rstd, weight, dresidual, dweight, dbias, shape), threads);
}

void dropout(Address x, Address y, int64_t runs, int64_t run, int dtype, int threads,
             const Dropout& keys) {
  dropout_cpu(dropout_of(x, y, runs, run, dtype, keys), threads);
}

void dropout_forward(Address x, Address residual, Address weight, Address bias, Address y,
                     Address s, Address mean, Address rstd, int64_t rows, int64_t hidden, int dtype,
                     int parameter_dtype, double eps, int threads, Address input_bias,
                     const Dropout& dropout) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  NormForward args = forward_of(x, residual, weight, bias, y, s, mean, rstd, shape, eps);
  args.input_bias = pointer(input_bias);
  args.dropout = &dropout;
  add_norm_forward_cpu(args, threads);
}

void dropout_backward(Address dy, Address ds, Address s, Address mean, Address rstd, Address weight,
                      Address dresidual, Address dweight, Address dbias, int64_t rows,
                      int64_t hidden, int dtype, int parameter_dtype, int threads, Address dx,
                      Address dinput_bias, const Dropout& dropout) {
  const NormShape shape = shape_of(rows, hidden, dtype, parameter_dtype);
  NormBackward args =
      backward_of(dy, ds, s, mean, rstd, weight, dresidual, dweight, dbias, shape);
  args.dx = pointer(dx);
  args.dinput_bias = pointer(dinput_bias);
  args.dropout = &dropout;
  add_norm_backward_cpu(args, threads);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Kernels of autoshard that run on the CPU.";
  define_dropout(module);
  using release = py::call_guard<py::gil_scoped_release>;
  module.def("add_norm_forward", &forward, release());
  module.def("add_norm_backward", &backward, release());
  module.def("dropout", &dropout, release());
  module.def("dropout_add_norm_forward", &dropout_forward, release());
  module.def("dropout_add_norm_backward", &dropout_backward, release());
  module.def("instruction_sets", &cpu_instruction_sets);
  module.def("use_instruction_set", &use_cpu_instruction_set);
}
