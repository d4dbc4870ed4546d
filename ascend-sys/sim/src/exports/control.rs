//! What only the simulator has: settings, faults, counters, the log, modelled time. See the crate's documentation.

#![allow(unsafe_code)]

use crate::control::{self, Fault};
use crate::executor::EXECUTORS;
use crate::ffi::{HostBytes, Text};
use crate::registry::Handle;
use crate::runtime::event::EVENTS;
use crate::runtime::memory::memory;
use crate::runtime::stream::STREAMS;
use crate::runtime::{capture, collective, context, memory, stream, task};
use crate::settings;
use crate::tensor::{INT_ARRAYS, LISTS, SCALARS, TENSORS};

const REFUSED: i32 = -1;

/// Everything as at the start: settings, memory, handles; work that runs is ended.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_reset() {
    control::release();
    stream::close_all(|_| true);
    capture::reset();
    context::reset();
    collective::reset();
    EVENTS.clear();
    EXECUTORS.clear();
    TENSORS.clear();
    LISTS.clear();
    SCALARS.clear();
    INT_ARRAYS.clear();
    memory().clear();
    memory::reset_pinned();
    task::reset();
    super::process::reset();
    control::reset();
}

#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_set(name: Text, value: i64) -> i32 {
    let is_known = name.get().is_some_and(|name| settings::set(&name, value));
    if is_known { 0 } else { REFUSED }
}

/// A setting's present value; the least number there is if there is no such setting.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_setting(name: Text) -> i64 {
    name.get().and_then(|name| settings::value(&name)).unwrap_or(i64::MIN)
}

/// Kinds: 0 the call fails, 1 its task fails, 2 its task hangs, 3 its task overflows.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_fault(kind: i32, name: Text, nth: u64, code: i32, is_lasting: i32) -> i32 {
    let fault = match kind {
        0 => Fault::Call,
        1 => Fault::Task,
        2 => Fault::Hang,
        3 => Fault::Overflow,
        _ => return REFUSED,
    };
    let Some(name) = name.get() else { return REFUSED };
    control::demand(fault, name, nth, code, is_lasting != 0);
    0
}

/// From now on every call answers the code; 0 brings the device back.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_lose_device(code: i32) {
    control::lose_device(code);
}

/// Lets hung tasks go on.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_release() {
    control::release();
}

#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_count(name: Text) -> u64 {
    name.get().map_or(0, |name| control::count(&name))
}

/// Live things of a sort; `u64::MAX` for an unknown sort.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_live(sort: Text) -> u64 {
    let count = |n: usize| n as u64;
    match sort.get().as_deref() {
        Some("device_blocks") => count(memory().live().0),
        Some("device_bytes") => memory().live().1,
        Some("pinned_blocks") => count(memory::live_pinned().0),
        Some("pinned_bytes") => memory::live_pinned().1,
        Some("streams") => count(STREAMS.len()),
        Some("events") => count(EVENTS.len()),
        Some("contexts") => count(context::CONTEXTS.len()),
        Some("graphs") => count(capture::GRAPHS.len()),
        Some("executors") => count(EXECUTORS.len()),
        Some("descriptors") => count(TENSORS.len() + LISTS.len() + SCALARS.len() + INT_ARRAYS.len()),
        Some("communicators") => count(collective::COMMUNICATORS.len()),
        _ => u64::MAX,
    }
}

/// Modelled nanoseconds: 0 host, 1 device, 2 device busy.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_clock(which: i32) -> u64 {
    let (host, device, busy) = task::clocks();
    match which {
        0 => host,
        1 => device,
        _ => busy,
    }
}

/// Whether a handle's address could be followed: for tests of the border.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_is_device_address(address: Handle) -> i32 {
    i32::from(memory().holds(address))
}

fn text(text: &str, buffer: usize, capacity: u64) -> u64 {
    let bytes = text.as_bytes();
    let room = usize::try_from(capacity).unwrap_or(0).min(bytes.len());
    if buffer != 0 {
        HostBytes::new(buffer, room).copy_from(&bytes[..room]);
    }
    bytes.len() as u64
}

/// The call log as text; answers its length, writes what fits.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_log(buffer: usize, capacity: u64) -> u64 {
    text(&control::log_text(), buffer, capacity)
}

#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_clear_log() {
    control::clear_log();
}

/// Complaints as text, one a line; answers their length, writes what fits.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_complaints(buffer: usize, capacity: u64) -> u64 {
    text(&control::complaints_text(), buffer, capacity)
}
