//! Bindings to `AscendCL`, the runtime of Huawei's Ascend NPUs, loaded at run time.
//!
//! The crate links to no vendor library, so it builds on any machine. [`Library::open`] finds and opens the vendor's
//! libraries when the program runs. If a library or a function is missing, the error is typed, lists the paths that
//! were tried and suggests a fix. The layers, from the bottom up:
//!
//! - [`abi`] and [`Symbols`]: constants, structs and functions as declared in C;
//! - [`Runtime`], [`Context`], [`Stream`], [`Event`], [`DeviceBuffer`], [`PinnedBuffer`], [`Graph`]: safe wrappers.
//!   Each fallible call returns a `Result` with the runtime's own error message, and each object is destroyed in its
//!   own context;
//! - [`Ops`]: the operations of a decoder, called through the kernel shim, a small C library that this crate compiles;
//! - [`Communicator`]: collectives between devices; [`DcmiCard`]: power, clocks, memory and health of a card.
//!
//! Libraries stay loaded until the process ends, because they leave threads and exit handlers running. Wrong arguments
//! to safe functions cannot corrupt host memory: a wrong device address makes its stream fail. Only queued copies to
//! and from host memory are `unsafe`.
//!
//! ```no_run
//! use ascend_sys::{Context, Library, Runtime, Stream};
//!
//! let runtime = Runtime::load(&Library::open(None)?)?;
//! runtime.init()?;
//! println!("{} NPUs, {:?}", runtime.device_count()?, runtime.soc_name());
//! let context = Context::create(&runtime, 0)?;
//! let stream = Stream::new(&context)?;
//! stream.synchronize(None)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod abi;
mod collective;
mod context;
mod dcmi;
mod error;
mod ffi;
mod graph;
mod memory;
mod ops;
mod runtime;
mod stream;
mod tensor;

pub use collective::{Collectives, Communicator, RootInfo};
pub use context::Context;
pub use dcmi::{DCMI_LIBRARY, Dcmi, DcmiCard, Hbm, Health, Unit};
pub use error::{AscendError, AscendErrorKind, Attempt, LoadError, SHIM_MISUSE, SHIM_NO_DESCRIPTOR, SHIM_NO_SYMBOL};
pub use ffi::loader::Library;
pub use ffi::symbols::{DcmiSymbols, HcclSymbols, Symbols};
pub use graph::{Capture, CaptureMode, Graph, TaskGroup, TaskUpdate};
pub use memory::{DeviceAddress, DeviceBuffer, Pages, PinnedBuffer};
pub use ops::Ops;
pub use ops::attention::{Attention, MASK_SIDE, Mask, QueryLayout};
pub use ops::shim::Op;
pub use runtime::{Capabilities, Runtime};
pub use stream::{Event, EventKind, Stream, is_wait_timeout};
pub use tensor::{ElemType, MAX_RANK, TensorDesc};
