//! Without a usable library, loading returns a typed error that names the file and the remedy, and never crashes.

use ascend_sys::{AscendErrorKind, Library, LoadError, Runtime};
use std::path::Path;

#[test]
fn a_missing_file_is_named() {
    let path = Path::new("/nowhere/libascendcl.so");
    let error = Library::open(Some(path)).expect_err("nothing there");
    let LoadError::NotFound { tried } = &error else { panic!("{error:?}") };
    assert_eq!(tried.len(), 1, "a path given is the only place");
    assert_eq!((tried[0].path.as_path(), tried[0].reason.as_str()), (path, "no such file"));
    assert!(error.to_string().contains("ASCEND_HOME_PATH"), "{error}");
}

#[test]
fn a_folder_without_the_library_is_searched_and_named() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let error = Library::open(Some(&folder)).expect_err("sources only");
    let LoadError::NotFound { tried } = error else { panic!("{error:?}") };
    let paths: Vec<_> = tried.into_iter().map(|attempt| attempt.path).collect();
    assert_eq!(paths, [folder.join("libascendcl.so"), folder.join("libacl_rt.so")]);
}

#[test]
fn a_file_that_is_no_library_is_refused_with_the_loaders_words() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let error = Library::open(Some(&path)).expect_err("text");
    let LoadError::Unloadable { path: named, reason } = &error else { panic!("{error:?}") };
    assert_eq!(named, &path);
    assert!(!reason.is_empty() && error.to_string().contains(reason.as_str()), "{error}");
}

#[test]
#[cfg(unix)]
fn a_path_with_a_nul_is_refused() {
    use std::os::unix::ffi::OsStrExt as _;
    let path = Path::new(std::ffi::OsStr::from_bytes(b"/tmp/a\0b"));
    assert!(matches!(Library::open(Some(path)), Err(LoadError::NotFound { .. })));
}

/// The C library loads and has none of the functions.
#[test]
#[cfg(target_os = "linux")]
fn another_library_lacks_the_first_symbol() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let libc = maps
        .lines()
        .filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")))
        .find(|path| path.contains("/libc.so") || path.contains("/libc-") || path.contains("/ld-musl"))
        .expect("a C library");
    let library = Library::open(Some(Path::new(&libc))).expect("opens");
    assert_eq!(library.path(), Path::new(&libc));
    let error = Runtime::load(&library).expect_err("no aclInit");
    assert_eq!(error, LoadError::MissingSymbol { library: libc.clone().into(), symbol: "aclInit" });
    assert!(error.to_string().contains(&libc) && error.to_string().contains("aclInit"), "{error}");
}

/// Codes of a documented class map to the kind of that class, and no other codes do.
#[test]
fn codes_are_sorted_as_documented() {
    let kind = |class: &str| match class {
        "oom" => AscendErrorKind::OutOfMemory,
        "resource-exhausted" => AscendErrorKind::ResourceExhausted,
        "overflow" => AscendErrorKind::Overflow,
        "wait-timeout" => AscendErrorKind::WaitTimeout,
        "kernel-timeout" => AscendErrorKind::KernelTimeout,
        "kernel-exception" => AscendErrorKind::KernelException,
        "device-lost" => AscendErrorKind::DeviceLost,
        "hardware-memory" => AscendErrorKind::HardwareMemory,
        "link" => AscendErrorKind::Link,
        "capture" => AscendErrorKind::Capture,
        "aborted" => AscendErrorKind::Aborted,
        "usage" => AscendErrorKind::Usage,
        "unsupported" => AscendErrorKind::Unsupported,
        "already-initialized" => AscendErrorKind::AlreadyInitialized,
        other => panic!("unknown class {other}"),
    };
    let mut documented = std::collections::HashMap::new();
    for line in include_str!("data/error_classes.txt").lines().filter(|line| !line.starts_with('#')) {
        let (code, class) = line.split_once(' ').expect("code and class");
        documented.insert(code.parse::<i32>().expect("a code"), kind(class.split(' ').next().expect("a class")));
    }
    assert_eq!(documented.len(), 82);
    for code in (0..1000).flat_map(|n| [100_000, 107_000, 148_000, 200_000, 207_000, 500_000, 507_000].map(|b| b + n)) {
        let want = documented.get(&code).copied().unwrap_or(AscendErrorKind::Other);
        assert_eq!(AscendErrorKind::from_code(code), want, "{code}");
    }
}
