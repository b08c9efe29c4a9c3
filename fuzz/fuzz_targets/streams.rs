//! See `nccl_net_spark_fuzz::streams`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nccl_net_spark_fuzz::streams::check(data);
});
