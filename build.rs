//! Link arguments of the plugin's library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // NCCL looks for this file name. Cargo names the file libnccl_net_spark.so.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-spark.so");
        // NCCL closes its plugins with `dlclose`. If the code were unmapped then, destructors of
        // thread-local values would crash.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // Reports a missing symbol when the plugin is loaded, not during a collective.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    }
}
