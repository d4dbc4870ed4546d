//! Compiles the kernel shim. This needs a C compiler, but no part of CANN.

fn main() {
    const SOURCES: [&str; 6] = ["op.c", "dense.c", "attention.c", "quant.c", "sampling.c", "moe.c"];
    const HEADERS: [&str; 3] = ["functions.h", "shim.h", "op.h"];
    for file in SOURCES.iter().chain(&HEADERS) {
        println!("cargo::rerun-if-changed=shim/{file}");
    }
    cc::Build::new()
        .files(SOURCES.map(|file| format!("shim/{file}")))
        .std("c11")
        .extra_warnings(true)
        .compile("ascend_shim");
}
