// What mix.cu compiles and softmax_link.cu only uses: CROWDNAL_TEMPLATE is `template` there, `extern template` here.
#define CROWDNAL_ROWS(T) \
  CROWDNAL_TEMPLATE void mix_annotators(Context&, const GradRows<T>&, const T*, const Index&, const Shape&, T*);
#define CROWDNAL_MATRICES(T, E)                                                                    \
  CROWDNAL_TEMPLATE void mix(Context&, const MixInput<T, E>&, const Index&, const Shape&, T*, T*); \
  CROWDNAL_TEMPLATE void mix_items(Context&, const GradRows<T>&, const E*, const Index&, const Shape&, T*);
CROWDNAL_ROWS(float)
CROWDNAL_ROWS(double)
CROWDNAL_MATRICES(float, float)
CROWDNAL_MATRICES(float, Half)
CROWDNAL_MATRICES(float, BFloat16)
CROWDNAL_MATRICES(double, double)
#undef CROWDNAL_ROWS
#undef CROWDNAL_MATRICES
#undef CROWDNAL_TEMPLATE
