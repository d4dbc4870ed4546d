//! `libascendcl`: device memory, pinned memory, copies.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::{Done, Fail, RT_CAPTURE_MODE, RT_FEATURE_NOT_SUPPORTED, RT_PARAM_INVALID, rule};
use crate::control;
use crate::control::Note;
use crate::ffi::{HostBytes, Out, call, plain};
use crate::registry::Handle;
use crate::runtime::memory::{DeviceMemory, memory};
use crate::runtime::stream::{Stream, Work};
use crate::runtime::task::{Body, Cost, Task};
use crate::runtime::{capture, context, memory};
use crate::settings::Setting;
use std::sync::Arc;

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMalloc(address: Out<usize>, bytes: usize, policy: i32) -> i32 {
    let note = Note { kind: "device", bytes: bytes as u64 };
    call("aclrtMalloc", note, || {
        let context = context::current()?;
        rule!((0..=7).contains(&(policy & 0xFF)), RT_PARAM_INVALID, "policy {policy}");
        rule!(!address.is_null(), RT_PARAM_INVALID, "a place for an answer is null");
        address.put(memory().allocate(bytes, context.device.unsigned_abs())?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtFree(address: usize) -> i32 {
    plain("aclrtFree", || {
        context::current()?;
        memory().free(address)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMallocHost(address: Out<usize>, bytes: usize) -> i32 {
    let note = Note { kind: "pinned", bytes: bytes as u64 };
    call("aclrtMallocHost", note, || {
        context::current()?;
        rule!(!address.is_null(), RT_PARAM_INVALID, "a place for an answer is null");
        address.put(memory::allocate_pinned(bytes)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtFreeHost(address: usize) -> i32 {
    plain("aclrtFreeHost", || {
        if !memory::is_left_over(address) {
            context::current()?;
        }
        memory::free_pinned(address)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetMemInfo(attribute: i32, free: Out<usize>, total: Out<usize>) -> i32 {
    plain("aclrtGetMemInfo", || {
        let context = context::current()?;
        rule!((0..=17).contains(&attribute), RT_PARAM_INVALID, "attribute {attribute}");
        let all = Setting::hbm_bytes.size();
        let used = memory().used_bytes(context.device.unsigned_abs());
        free.put(usize::try_from(all.saturating_sub(used)).unwrap_or(usize::MAX))?;
        total.put(usize::try_from(all).unwrap_or(usize::MAX))
    })
}

/// Source and destination of a copy.
#[derive(Clone, Copy)]
enum Path {
    In(HostBytes, usize),
    Out(usize, HostBytes),
    Within(usize, usize),
    Host(HostBytes, HostBytes),
}

impl Path {
    /// Determines the direction of a copy from its addresses, whatever its kind argument.
    fn from_places(dst: usize, src: usize, bytes: usize) -> Self {
        let memory = memory();
        match (memory.holds(dst), memory.holds(src)) {
            (true, true) => Self::Within(dst, src),
            (true, false) => Self::In(HostBytes::new(src, bytes), dst),
            (false, true) => Self::Out(src, HostBytes::new(dst, bytes)),
            (false, false) => Self::Host(HostBytes::new(dst, bytes), HostBytes::new(src, bytes)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::In(..) => "h2d",
            Self::Out(..) => "d2h",
            Self::Within(..) => "d2d",
            Self::Host(..) => "h2h",
        }
    }

    fn copy(self, memory: &mut DeviceMemory, bytes: usize) -> Done {
        match self {
            Self::In(src, dst) => memory.copy_in(dst, src, bytes)?,
            Self::Out(src, dst) => memory.copy_out(dst, src, bytes)?,
            Self::Within(dst, src) => memory.copy(dst, src, bytes)?,
            Self::Host(dst, src) => {
                let mut buffer = vec![0; bytes];
                src.copy_to(&mut buffer);
                dst.copy_from(&buffer);
            }
        }
        Ok(())
    }
}

fn check_copy(dst: usize, capacity: usize, src: usize, bytes: usize, kind: i32) -> Done {
    rule!(dst != 0 && src != 0, RT_PARAM_INVALID, "an end of the copy is null");
    rule!(bytes > 0 && bytes <= capacity, RT_PARAM_INVALID, "{bytes} bytes to {capacity}");
    rule!((0..=7).contains(&kind), RT_PARAM_INVALID, "kind {kind}");
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemcpy(dst: usize, capacity: usize, src: usize, bytes: usize, kind: i32) -> i32 {
    let path = Path::from_places(dst, src, bytes);
    call("aclrtMemcpy", Note { kind: path.name(), bytes: bytes as u64 }, || {
        context::current()?;
        capture::forbid("a blocking copy")?;
        check_copy(dst, capacity, src, bytes, kind)?;
        path.copy(&mut memory(), bytes).map_err(bad_address)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemset(dst: usize, capacity: usize, value: i32, bytes: usize) -> i32 {
    call("aclrtMemset", Note { kind: "set", bytes: bytes as u64 }, || {
        context::current()?;
        capture::forbid("a blocking fill")?;
        rule!(dst != 0 && bytes > 0 && bytes <= capacity, RT_PARAM_INVALID, "{bytes} bytes to {capacity}");
        let byte = value.to_le_bytes()[0];
        let mut memory = memory();
        if memory.holds(dst) {
            return memory.fill(dst, byte, bytes).map_err(bad_address);
        }
        rule!(memory::is_pinned(dst, bytes), RT_PARAM_INVALID, "pageable host memory cannot be filled");
        HostBytes::new(dst, bytes).fill(byte);
        Ok(())
    })
}

/// A blocking call reports a bad address at once.
fn bad_address(fail: Fail) -> Fail {
    Fail { code: RT_PARAM_INVALID, ..fail }
}

fn task(name: &'static str, body: Body, cost: Cost) -> Work {
    let fault = control::task_fault(name);
    Work::Task(Arc::new(Task { name, before: None, body, cost, fault, is_op: false, workspace_bytes: 0 }))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemcpyAsync(
    dst: usize,
    capacity: usize,
    src: usize,
    bytes: usize,
    kind: i32,
    stream: Handle,
) -> i32 {
    let name = "aclrtMemcpyAsync";
    let path = Path::from_places(dst, src, bytes);
    call(name, Note { kind: path.name(), bytes: bytes as u64 }, || {
        let stream = Stream::from_handle(stream)?;
        check_copy(dst, capacity, src, bytes, kind)?;
        let (is_pinned, cost) = match path {
            Path::Host(..) => {
                crate::codes::fail!(RT_FEATURE_NOT_SUPPORTED, "queued copies from host to host are not supported")
            }
            Path::In(..) => (memory::is_pinned(src, bytes), Cost { host_bytes: bytes as u64, ..Cost::default() }),
            Path::Out(..) => (memory::is_pinned(dst, bytes), Cost { host_bytes: bytes as u64, ..Cost::default() }),
            Path::Within(..) => (true, Cost { bytes: 2 * bytes as u64, ..Cost::default() }),
        };
        if !is_pinned {
            if let Some((capture, _)) = stream.capture() {
                return Err(capture.spoil_with(RT_CAPTURE_MODE, "a copy with pageable memory in a capture"));
            }
            control::complain("a queued copy with pageable memory waits for its stream");
        }
        let body: Body = Arc::new(move |memory| path.copy(memory, bytes));
        stream.submit(task(name, body, cost))?;
        if !is_pinned {
            stream.drain()?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemsetAsync(dst: usize, capacity: usize, value: i32, bytes: usize, stream: Handle) -> i32 {
    let name = "aclrtMemsetAsync";
    call(name, Note { kind: "set", bytes: bytes as u64 }, || {
        let stream = Stream::from_handle(stream)?;
        rule!(dst != 0 && bytes > 0 && bytes <= capacity, RT_PARAM_INVALID, "{bytes} bytes to {capacity}");
        let byte = value.to_le_bytes()[0];
        let body: Body = Arc::new(move |memory| memory.fill(dst, byte, bytes));
        stream.submit(task(name, body, Cost { bytes: bytes as u64, ..Cost::default() }))
    })
}
