//! Link arguments of the stand-in library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=ibverbs.map");
    let folder = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    // The compiler gives a cdylib an anonymous version script. That cannot be joined with versioned
    // symbols, which `dlvsym` asks for. So the library is a program that the linker makes a shared
    // object of. Its soname is its own: under the real one the dynamic linker would take it for
    // the real library wherever it is preloaded beside it.
    for argument in [
        "-shared",
        &format!("-Wl,--version-script={folder}/ibverbs.map"),
        "-Wl,-soname,libsoftverbs-ibverbs.so.1",
        // A program may close the library while its threads run and thread-local values
        // wait to be dropped.
        "-Wl,-z,nodelete",
        "-Wl,-z,now",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}
