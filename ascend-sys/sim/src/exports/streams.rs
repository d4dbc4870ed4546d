//! `libascendcl`: streams and events.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::{
    Done, EVENT_EXTERNAL, EVENT_SYNC, EVENT_TIME_LINE, RT_FEATURE_NOT_SUPPORTED, RT_INVALID_HANDLE, RT_NO_EVENT,
    RT_PARAM_INVALID, fail, rule,
};
use crate::control;
use crate::ffi::{Out, plain};
use crate::registry::Handle;
use crate::runtime::event::{EVENTS, Event, Kind};
use crate::runtime::stream::{STREAMS, Stream, Work};
use crate::runtime::{capture, context, stream, task};
use crate::settings::Setting;
use std::sync::Arc;
use std::time::Duration;

/// Converts a limit in ms; -1 is no limit.
fn limit(ms: i32) -> Done<Option<Duration>> {
    match ms {
        -1 => Ok(None),
        0.. => Ok(Some(Duration::from_millis(u64::from(ms.unsigned_abs())))),
        _ => fail!(RT_PARAM_INVALID, "a limit of {ms} ms"),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateStream(handle: Out<Handle>) -> i32 {
    plain("aclrtCreateStream", || handle.put(Stream::create()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateStreamWithConfig(handle: Out<Handle>, priority: u32, flags: u32) -> i32 {
    plain("aclrtCreateStreamWithConfig", || {
        rule!(priority == 0 && flags <= 0x3F, RT_PARAM_INVALID, "priority {priority}, flags {flags:#x}");
        handle.put(Stream::create()?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStream(handle: Handle) -> i32 {
    plain("aclrtDestroyStream", || stream::destroy(handle, false))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStreamForce(handle: Handle) -> i32 {
    plain("aclrtDestroyStreamForce", || stream::destroy(handle, true))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(handle: Handle) -> i32 {
    plain("aclrtSynchronizeStream", || {
        let stream = Stream::from_handle(handle)?;
        capture::forbid_on(&stream, "a wait")?;
        stream.synchronize(None)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStreamWithTimeout(handle: Handle, ms: i32) -> i32 {
    plain("aclrtSynchronizeStreamWithTimeout", || {
        let stream = Stream::from_handle(handle)?;
        capture::forbid_on(&stream, "a wait")?;
        stream.synchronize(limit(ms)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDevice() -> i32 {
    plain("aclrtSynchronizeDevice", || {
        capture::forbid("a wait for the device")?;
        stream::synchronize_device(context::current()?.device, None)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDeviceWithTimeout(ms: i32) -> i32 {
    plain("aclrtSynchronizeDeviceWithTimeout", || {
        capture::forbid("a wait for the device")?;
        stream::synchronize_device(context::current()?.device, limit(ms)?)
    })
}

/// 0 complete, 1 not ready.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamQuery(handle: Handle, status: Out<i32>) -> i32 {
    plain("aclrtStreamQuery", || {
        let stream = Stream::from_handle(handle)?;
        capture::forbid_on(&stream, "a query")?;
        status.put(i32::from(!stream.is_idle()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamAbort(handle: Handle) -> i32 {
    plain("aclrtStreamAbort", || {
        Stream::from_handle(handle)?.abort();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetStreamAvailableNum(count: Out<u32>) -> i32 {
    plain("aclrtGetStreamAvailableNum", || {
        context::current()?;
        let used = STREAMS.len() as u64 + capture::streams_used();
        count.put(u32::try_from(Setting::streams.size().saturating_sub(used)).unwrap_or(u32::MAX))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetStreamFailureMode(handle: Handle, mode: u64) -> i32 {
    plain("aclrtSetStreamFailureMode", || {
        let stream = Stream::from_handle(handle)?;
        rule!(mode <= 1, RT_PARAM_INVALID, "mode {mode}");
        if mode == 1 {
            stream.set_stop_on_failure();
        }
        Ok(())
    })
}

fn add_event(kind: Kind, flags: u32) -> Done<Handle> {
    context::current()?;
    if kind != Kind::Counting {
        rule!((EVENTS.len() as u64) < Setting::events.size(), RT_NO_EVENT, "all events are in use");
    }
    Ok(EVENTS.add(Arc::new(Event::new(kind, flags))))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateEventWithFlag(handle: Out<Handle>, flags: u32) -> i32 {
    plain("aclrtCreateEventWithFlag", || {
        let kind = match flags {
            EVENT_EXTERNAL => Kind::External,
            flags if flags & EVENT_EXTERNAL != 0 => fail!(RT_PARAM_INVALID, "an external event has no other flag"),
            _ => Kind::Flag,
        };
        handle.put(add_event(kind, flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateEventExWithFlag(handle: Out<Handle>, flags: u32) -> i32 {
    plain("aclrtCreateEventExWithFlag", || {
        rule!(flags & EVENT_EXTERNAL == 0, RT_PARAM_INVALID, "an external event is made without Ex");
        handle.put(add_event(Kind::Counting, flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyEvent(handle: Handle) -> i32 {
    plain("aclrtDestroyEvent", || EVENTS.remove(handle, RT_INVALID_HANDLE).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtRecordEvent(event: Handle, stream: Handle) -> i32 {
    plain("aclrtRecordEvent", || {
        let (stream, event) = (Stream::from_handle(stream)?, Event::from_handle(event)?);
        let ticket = if stream.capture().is_some() { 0 } else { event.queue_record() };
        stream.submit(Work::Record(event, ticket))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamWaitEvent(stream: Handle, event: Handle) -> i32 {
    plain("aclrtStreamWaitEvent", || {
        let (stream, event) = (Stream::from_handle(stream)?, Event::from_handle(event)?);
        let can_wait = event.kind == Kind::External || event.flags & EVENT_SYNC != 0;
        rule!(can_wait, RT_PARAM_INVALID, "streams wait for events with ACL_EVENT_SYNC only");
        capture::join(&stream, &event)?;
        let ticket = event.latest();
        stream.submit(Work::Wait(event, ticket))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetEvent(event: Handle, stream: Handle) -> i32 {
    plain("aclrtResetEvent", || {
        let (stream, event) = (Stream::from_handle(stream)?, Event::from_handle(event)?);
        rule!(event.kind != Kind::Counting, RT_FEATURE_NOT_SUPPORTED, "an Ex event is not reset");
        stream.submit(Work::Reset(event))
    })
}

/// 0 not ready, 1 complete: the reverse of streams.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtQueryEventStatus(event: Handle, status: Out<i32>) -> i32 {
    plain("aclrtQueryEventStatus", || {
        context::current()?;
        let event = Event::from_handle(event)?;
        capture::forbid_event(&event, "a query")?;
        status.put(i32::from(event.is_complete()))
    })
}

fn synchronize_event(event: Handle, limit: Option<Duration>) -> Done {
    let (context, event) = (context::current()?, Event::from_handle(event)?);
    capture::forbid_event(&event, "a wait")?;
    event.wait_host(limit, || {
        if let Some(code) = control::is_lost() {
            fail!(code, "device lost");
        }
        context.stopped().map_or(Ok(()), Err)
    })?;
    task::host_waits_until(event.at_ns());
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeEvent(event: Handle) -> i32 {
    plain("aclrtSynchronizeEvent", || synchronize_event(event, None))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeEventWithTimeout(event: Handle, ms: i32) -> i32 {
    plain("aclrtSynchronizeEventWithTimeout", || synchronize_event(event, limit(ms)?))
}

/// Modeled time, not the host's.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtEventElapsedTime(ms: Out<f32>, start: Handle, end: Handle) -> i32 {
    plain("aclrtEventElapsedTime", || {
        let (start, end) = (Event::from_handle(start)?, Event::from_handle(end)?);
        let have_times = start.flags & end.flags & EVENT_TIME_LINE != 0;
        rule!(have_times, RT_PARAM_INVALID, "both events need ACL_EVENT_TIME_LINE");
        rule!(start.is_complete() && end.is_complete(), RT_PARAM_INVALID, "an event is not complete");
        ms.put((end.at_ns() as f32 - start.at_ns() as f32) / 1e6)
    })
}
