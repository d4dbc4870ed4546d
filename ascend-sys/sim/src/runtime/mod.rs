//! Objects of the runtime: contexts, streams, events, memory, captured graphs, communicators, and the tasks that
//! streams run.

pub(super) mod capture;
pub(super) mod collective;
pub(super) mod context;
pub(super) mod event;
pub(super) mod memory;
pub(super) mod stream;
pub(super) mod task;
