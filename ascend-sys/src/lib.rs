//! `AscendCL`, the runtime of Huawei's Ascend NPUs, for programs that find it when they run.
//!
//! Nothing is linked: the crate builds on any machine, and [`Library::open`] looks for the vendor's libraries when the
//! program runs. A missing library or function is a typed error that says what was tried and what to do. From below:
//!
//! - [`abi`] and [`Symbols`]: constants, structs and functions as C declares them;
//! - [`Runtime`], [`Context`], [`Stream`], [`Event`], [`DeviceBuffer`], [`PinnedBuffer`], [`Graph`]: each call a `Result`
//!   with the runtime's own words, each object destroyed in its own context;
//! - [`Ops`]: the operations of a decoder over the kernel shim, a small C library that is compiled in;
//! - [`Communicator`]: sums and copies between devices; [`DcmiCard`]: what a card says of its power, clocks and memory.
//!
//! Libraries stay loaded until the process ends, since they leave threads and exit handlers behind. Host memory stays
//! safe whatever is passed: a wrong device address is a failure of its stream. Queued copies to and from host memory are
//! the one thing that is `unsafe`.
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
