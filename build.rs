//! Build script: detects the commit of the sources and the Neon intrinsics that the compiler supports.
//!
//! The script never fails a build, and its output does not depend on the date or the machine of the build. It leaves
//! out everything that it cannot detect.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

/// Environment variable that disables the probes, so that a new compiler can check the code for older compilers.
const NO_PROBES: &str = "ASCEND_LLM_NO_PROBES";

/// File that Cargo writes next to the manifest of a published package.
const PACKAGED_FROM: &str = ".cargo_vcs_info.json";

/// Each cfg flag, with the code that the compiler must accept before the flag is set.
const PROBES: [(&str, &str); 2] = [
    (
        "neon_f16_intrinsics",
        r#"
        #[target_feature(enable = "neon")]
        pub fn widen(halves: uint16x4_t) -> float32x4_t {
            vcvt_f32_f16(vreinterpret_f16_u16(halves))
        }

        #[target_feature(enable = "neon")]
        pub fn narrow(values: float32x4_t) -> uint16x4_t {
            vreinterpret_u16_f16(vcvt_f16_f32(values))
        }
        "#,
    ),
    (
        "neon_dot_intrinsic",
        r#"
        #[target_feature(enable = "neon,dotprod")]
        pub fn dot(sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
            vdotq_laneq_s32::<3>(sums, w, x)
        }
        "#,
    ),
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    println!("cargo::rerun-if-env-changed={NO_PROBES}");
    for (cfg, _) in PROBES {
        println!("cargo::rustc-check-cfg=cfg({cfg})");
    }
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    println!("cargo::rustc-env=ASCEND_LLM_COMMIT={}", commit().unwrap_or_default());
    let is_aarch64 = env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "aarch64");
    if is_aarch64 && env::var_os(NO_PROBES).is_none() {
        for (cfg, code) in PROBES {
            if compiles(cfg, code).unwrap_or(false) {
                println!("cargo::rustc-cfg={cfg}");
            }
        }
    }
}

/// Returns the first 12 digits of the commit, with `-dirty` if the files differ from it.
fn commit() -> Option<String> {
    if let Ok(info) = fs::read_to_string(PACKAGED_FROM) {
        println!("cargo::rerun-if-changed={PACKAGED_FROM}");
        return packaged_commit(&info);
    }
    checked_out_commit()
}

/// Returns the commit in `{"git": {"sha1": "…", "dirty": true}, …}`; a clean package has no `dirty`.
fn packaged_commit(info: &str) -> Option<String> {
    let value = |key: &str| {
        let (_, rest) = info.split_once(&format!("\"{key}\""))?;
        rest.trim_start().strip_prefix(':').map(str::trim_start)
    };
    let digits = value("sha1")?.strip_prefix('"')?.get(..12)?;
    let is_dirty = value("dirty").is_some_and(|value| value.starts_with("true"));
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| described(digits, is_dirty))
}

fn checked_out_commit() -> Option<String> {
    // If the crate is a folder of another repository, the prefix is not empty: that repository's commit does not
    // identify the crate's sources.
    if !git(&["rev-parse", "--show-prefix"])?.is_empty() {
        return None;
    }
    // Untracked files are ignored: they become part of the library only if a tracked file refers to them, and that
    // change is reported. Cargo leaves an untracked file in its checkouts.
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let digits = git(&["rev-parse", "--short=12", "HEAD"])?;
    rerun_if_moved();
    Some(described(&digits, !changes.is_empty()))
}

/// Reruns the script only when another commit is checked out or the sources change.
///
/// Cargo treats an absent file as changed, so the function lists only files that exist.
fn rerun_if_moved() {
    let path = |name: &str| git(&["rev-parse", "--git-path", name]).map(PathBuf::from).filter(|path| path.is_file());
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    // A packed branch has no file of its own. When such a branch moves, the log of HEAD grows.
    let moved = branch.and_then(|branch| path(&branch).or_else(|| path("logs/HEAD")));
    for path in [path("HEAD"), moved].into_iter().flatten() {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    println!("cargo::rerun-if-changed=src");
}

fn described(digits: &str, is_dirty: bool) -> String {
    format!("{digits}{}", if is_dirty { "-dirty" } else { "" })
}

/// Returns git's output for the folder of the manifest, without the final line break.
fn git(arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // Git sets these variables for its hooks, and a hook of another repository may build this crate.
    for variable in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
        command.env_remove(variable);
    }
    // Without optional locks, `git status` does not write the index.
    let output = command.arg("--no-optional-locks").args(arguments).stderr(Stdio::null()).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8(output.stdout))?.ok()?;
    Some(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Returns whether the compiler in use accepts the code for the target, without unstable features.
fn compiles(name: &str, code: &str) -> Option<bool> {
    let out = env::var_os("OUT_DIR")?;
    let file = Path::new(&out).join(name).with_extension("rs");
    fs::write(&file, format!("#![no_std]\nuse core::arch::aarch64::*;\n{code}")).ok()?;
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let status = Command::new(env::var_os("RUSTC")?)
        .args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--cap-lints=allow", "--target"])
        .arg(env::var_os("TARGET")?)
        .args(flags.split('\x1f').filter(|flag| !flag.is_empty()))
        .arg("--out-dir")
        .arg(&out)
        .arg(&file)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    Some(status.ok()?.success())
}
