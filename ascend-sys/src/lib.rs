//! Raw declarations and run-time loader of `AscendCL`, the runtime of Huawei's Ascend NPUs.
//!
//! Nothing is linked: the crate builds on any machine, and [`Library::open`] looks for the vendor's library when the
//! program runs. A missing library or symbol is a typed error that says what was tried and what to do. Three levels:
//! [`Library`] opens and looks up, [`Symbols`] holds the declared functions, [`Runtime`] calls them and turns codes into
//! [`AclError`]. The library stays loaded until the process ends, since it leaves threads and exit handlers behind.
//!
//! ```no_run
//! let runtime = ascend_sys::Runtime::load(&ascend_sys::Library::open(None)?)?;
//! runtime.init()?;
//! println!("{} NPUs, {:?}", runtime.device_count()?, runtime.soc_name());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dl;
mod error;
mod loader;
mod runtime;
mod symbols;

pub use error::{AclError, AclErrorKind, Attempt, LoadError};
pub use loader::Library;
pub use runtime::Runtime;
pub use symbols::{ACL_ERROR_REPEAT_INITIALIZE, ACL_SUCCESS, Symbols};
