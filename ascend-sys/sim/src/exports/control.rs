//! Functions that only the simulator has: settings, faults, counters, the log, modeled time. See the crate's
//! documentation.

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

/// Restores the initial state of settings, memory and handles; aborts running work.
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

/// Value of a setting; `i64::MIN` if there is no such setting.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_setting(name: Text) -> i64 {
    name.get().and_then(|name| settings::value(&name)).unwrap_or(i64::MIN)
}

/// Injects a fault. Kinds: 0 the call fails, 1 its task fails, 2 its task hangs, 3 its task overflows.
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

/// Makes every call return the code from now on; 0 restores the device.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_lose_device(code: i32) {
    control::lose_device(code);
}

/// Releases hanging tasks.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_release() {
    control::release();
}

#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_count(name: Text) -> u64 {
    name.get().map_or(0, |name| control::count(&name))
}

/// Number of live objects of a kind; `u64::MAX` for an unknown kind.
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

/// Modeled nanoseconds: 0 host, 1 device, 2 device busy.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_clock(which: i32) -> u64 {
    let (host, device, busy) = task::clocks();
    match which {
        0 => host,
        1 => device,
        _ => busy,
    }
}

/// Whether a handle could be dereferenced; for tests of the C boundary.
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

/// Writes as much of the call log as fits; returns the length of the whole text.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_log(buffer: usize, capacity: u64) -> u64 {
    text(&control::log_text(), buffer, capacity)
}

#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_clear_log() {
    control::clear_log();
}

/// Writes as many complaints as fit, one per line; returns the length of the whole text.
#[unsafe(no_mangle)]
pub extern "C" fn ascend_sim_complaints(buffer: usize, capacity: u64) -> u64 {
    text(&control::complaints_text(), buffer, capacity)
}
