// What joint_link.cu compiles and em_step.cu only uses: CROWDNAL_TEMPLATE is `template` there, `extern template` here.
#define CROWDNAL_JOINT_LINK(T, E)                                                                               \
  CROWDNAL_TEMPLATE void joint_link(Context&, const T*, bool, const E*, const T*, const int64_t*, const Index&, \
                                    const Shape&, Normalization, bool, T*, T*, T*, T*);
CROWDNAL_JOINT_LINK(float, float)
CROWDNAL_JOINT_LINK(float, Half)
CROWDNAL_JOINT_LINK(float, BFloat16)
CROWDNAL_JOINT_LINK(double, double)
#undef CROWDNAL_JOINT_LINK
#undef CROWDNAL_TEMPLATE
