//! Finds and opens the libraries, and looks up symbols.
//!
//! Search order: the given path and no other; without a path `$ASCEND_HOME_PATH/lib64`, then
//! `$ASCEND_TOOLKIT_HOME/lib64`, then the system loader's own search. The first place that contains the library is
//! used. The runtime's functions are in `libascendcl.so`, from CANN 8.5 on also in `libacl_rt.so`: all existing ones of
//! these two files are opened, and a symbol is looked up in each. Libraries are opened globally, because the vendor's
//! other libraries resolve symbols against them, and are never closed, because unloading is not supported.
//!
//! The runtime has companion libraries: descriptors (`libnnopbase.so`), operations and collectives. From CANN 8.5 on
//! the operations are split into several `libopapi_*.so`; if one of those exists, the old `libopapi.so` is not opened,
//! because the two must not be mixed. A runtime that contains the descriptors itself (the simulator) has no companions.

#![forbid(unsafe_code)]

use crate::error::{Attempt, LoadError};
use crate::ffi::dl;
use crate::ffi::dl::Handle;
use std::ffi::{CStr, OsString, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// File names of the runtime's library, the usual one first.
const NAMES: [&str; 2] = ["libascendcl.so", "libacl_rt.so"];

/// Function whose presence shows that a library contains the descriptors of `aclnn`.
const DESCRIPTORS: &CStr = c"aclCreateTensor";

/// Operation libraries from CANN 8.5 on, one per source repository.
const SPLIT_OPS: [&str; 3] = ["libopapi_math.so", "libopapi_nn.so", "libopapi_transformer.so"];

/// Variables set by the toolkit's `set_env.sh`; older versions set the second one.
const HOMES: [&str; 2] = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"];

/// Open library. It stays loaded until the process ends.
#[derive(Debug)]
pub struct Library {
    handles: Vec<Handle>,
    path: PathBuf,
    companions: Vec<PathBuf>,
}

impl Library {
    /// Opens the library at `path` (a file, or a folder that contains it), or searches for it if `path` is `None`.
    ///
    /// Opening a library runs its initialization code, as linking to it would.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] if no searched place contains the library; [`LoadError::Unloadable`] if the system's
    /// loader cannot load an existing file.
    pub fn open(path: Option<&Path>) -> Result<Self, LoadError> {
        Self::open_among(&places(path, |variable| std::env::var_os(variable)))
    }

    /// Opens one file without companions. The error is the loader's message.
    pub(crate) fn open_alone(path: &Path) -> Result<Self, String> {
        if !path.exists() {
            return Err("no such file".to_owned());
        }
        Ok(Self { handles: vec![Handle::open(path)?], path: path.to_owned(), companions: Vec::new() })
    }

    /// Returns the path of the loaded library: that reported by the system's loader, else that with which it was
    /// opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the companion libraries that were opened: descriptors, operations, collectives.
    pub fn companions(&self) -> &[PathBuf] {
        &self.companions
    }

    /// Returns the address of a function; `symbol` is the same name, for the error.
    pub(crate) fn address(&self, name: &CStr, symbol: &'static str) -> Result<NonNull<c_void>, LoadError> {
        self.find(name).ok_or_else(|| LoadError::MissingSymbol { library: self.path.clone(), symbol })
    }

    pub(crate) fn find(&self, name: &CStr) -> Option<NonNull<c_void>> {
        self.handles.iter().find_map(|handle| handle.find(name))
    }

    fn open_among(places: &[Place]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for place in places {
            let mut opened: Option<Self> = None;
            for file in &place.files {
                // Check that the file exists before opening it, to distinguish a missing file from a broken one.
                if place.known && !file.exists() {
                    if opened.is_none() {
                        tried.push(Attempt { path: file.clone(), reason: "no such file".into() });
                    }
                    continue;
                }
                match Handle::open(file) {
                    Ok(handle) => opened
                        .get_or_insert_with(|| Self { handles: Vec::new(), path: file.clone(), companions: Vec::new() })
                        .handles
                        .push(handle),
                    Err(reason) if place.known => {
                        return Err(LoadError::Unloadable { path: file.clone(), reason });
                    }
                    Err(reason) => {
                        if opened.is_none() {
                            tried.push(Attempt { path: file.clone(), reason });
                        }
                    }
                }
            }
            if let Some(mut library) = opened {
                if library.find(DESCRIPTORS).is_none() {
                    library.open_companions(place.folder())?;
                }
                if let Some(path) = library.find(c"aclInit").and_then(dl::file_of) {
                    library.path = path;
                }
                return Ok(library);
            }
        }
        Err(LoadError::NotFound { tried })
    }

    /// Opens the companions in the runtime's folder, or by name if the system's loader found the runtime.
    ///
    /// A missing companion is reported when its first function is looked up; an existing one must load.
    fn open_companions(&mut self, folder: Option<&Path>) -> Result<(), LoadError> {
        for name in companion_names(folder) {
            let file = folder.map_or_else(|| PathBuf::from(&name), |folder| folder.join(&name));
            if folder.is_some() && !file.exists() {
                continue;
            }
            match Handle::open(&file) {
                Ok(handle) => {
                    self.handles.push(handle);
                    self.companions.push(file);
                }
                Err(reason) if folder.is_some() => return Err(LoadError::Unloadable { path: file, reason }),
                Err(_) => {}
            }
        }
        Ok(())
    }
}

/// Files of one search place; the first one that opens is the library's path.
#[derive(Debug, PartialEq)]
struct Place {
    files: Vec<PathBuf>,
    /// Whether the files are paths. If not, they are names for the system's loader to search.
    known: bool,
}

impl Place {
    /// Returns the folder of the files; `None` if the system's loader searches.
    fn folder(&self) -> Option<&Path> {
        self.files.first().filter(|_| self.known).and_then(|file| file.parent())
    }
}

/// Returns the companions in the order of opening: a library resolves symbols against those opened before it.
fn companion_names(folder: Option<&Path>) -> Vec<String> {
    let mut split: Vec<String> = match folder {
        None => SPLIT_OPS.map(String::from).into(),
        Some(folder) => std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("libopapi_") && Path::new(name).extension().is_some_and(|end| end == "so"))
            .collect(),
    };
    split.sort();
    let ops = if split.is_empty() { vec!["libopapi.so".to_owned()] } else { split };
    [vec!["libnnopbase.so".to_owned()], ops, vec!["libhccl.so".to_owned()]].concat()
}

fn places(path: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Vec<Place> {
    let folder = |folder: &Path| Place { files: NAMES.map(|name| folder.join(name)).into(), known: true };
    if let Some(path) = path {
        let place = if path.is_dir() { folder(path) } else { Place { files: vec![path.into()], known: true } };
        return vec![place];
    }
    let homes = HOMES.iter().filter_map(|name| variable(name)).filter(|home| !home.is_empty());
    let mut places: Vec<Place> = homes.map(|home| folder(&Path::new(&home).join("lib64"))).collect();
    places.push(Place { files: NAMES.map(PathBuf::from).into(), known: false });
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(place: &Place) -> Vec<&str> {
        place.files.iter().map(|file| file.to_str().expect("the path is UTF-8")).collect()
    }

    #[test]
    fn places_come_in_order() {
        let both = |name: &str| Some(OsString::from(if name == "ASCEND_HOME_PATH" { "/new" } else { "/old" }));
        let found = places(None, both);
        assert_eq!(found.len(), 3);
        assert_eq!(files(&found[0]), ["/new/lib64/libascendcl.so", "/new/lib64/libacl_rt.so"]);
        assert_eq!(files(&found[1]), ["/old/lib64/libascendcl.so", "/old/lib64/libacl_rt.so"]);
        assert_eq!(files(&found[2]), ["libascendcl.so", "libacl_rt.so"]);
        assert!(found[0].known && !found[2].known);
        // A given path is the only place, and an empty variable is ignored.
        assert_eq!(places(Some(Path::new("/x/y.so")), both), [Place { files: vec!["/x/y.so".into()], known: true }]);
        assert_eq!(places(None, |_| Some(OsString::new())).len(), 1);
        assert_eq!(places(None, |_| None).len(), 1);
    }

    #[test]
    fn split_operations_replace_the_old_library() {
        let folder = std::env::temp_dir().join(format!("ascend-companions-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the folder is created");
        assert_eq!(companion_names(Some(&folder)), ["libnnopbase.so", "libopapi.so", "libhccl.so"]);
        for name in ["libopapi.so", "libopapi_nn.so", "libopapi_cv.so", "libopapi_nn.so.bak"] {
            std::fs::write(folder.join(name), "").expect("the file is written");
        }
        let names = companion_names(Some(&folder));
        std::fs::remove_dir_all(&folder).expect("the folder is removed");
        assert_eq!(names, ["libnnopbase.so", "libopapi_cv.so", "libopapi_nn.so", "libhccl.so"]);
    }

    #[test]
    fn every_place_tried_is_named() {
        let home = |name: &str| (name == "ASCEND_HOME_PATH").then(|| OsString::from("/nowhere/ascend"));
        let mut list = places(None, home);
        // No system has a library of this name, so the test also passes on machines with the real library.
        list[1].files = vec!["libno-such-acl.so".into()];
        let error = Library::open_among(&list).expect_err("no place contains the library");
        let LoadError::NotFound { tried } = &error else { panic!("{error:?}") };
        let paths: Vec<_> = tried.iter().map(|attempt| attempt.path.to_str().expect("the path is UTF-8")).collect();
        let folder = "/nowhere/ascend/lib64";
        assert_eq!(
            paths,
            [format!("{folder}/libascendcl.so"), format!("{folder}/libacl_rt.so"), "libno-such-acl.so".to_owned()]
        );
        let text = error.to_string();
        assert!(paths.iter().all(|path| text.contains(path)) && text.contains("set_env.sh"), "{text}");
    }
}
