//! See `nccl_net_spark_fuzz::mailbox`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    nccl_net_spark_fuzz::mailbox::check(data);
});
