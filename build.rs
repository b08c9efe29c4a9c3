//! Link arguments of the plugin's library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // NCCL looks for this name, whatever the crate is called.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-spark.so");
        // NCCL closes its plugins; the destructors of thread-local values would then run in unmapped code.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // A symbol that is missing shows when the plugin is loaded, not in the middle of a collective.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    }
}
