//! Link arguments of the stand-in library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=ibverbs.map");
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    // A cdylib has an anonymous version script, which excludes the versioned symbols that `dlvsym`
    // needs. So the linker makes a shared object of a program. With the real library's soname, the
    // dynamic linker would take it for that library when it is preloaded beside it.
    for argument in [
        "-shared",
        &format!("-Wl,--version-script={folder}/ibverbs.map"),
        "-Wl,-soname,libsoftverbs-ibverbs.so.1",
        // The library's threads and thread-local values may outlive a program's `dlclose`.
        "-Wl,-z,nodelete",
        "-Wl,-z,now",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
