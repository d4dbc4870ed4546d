//! `libascendcl`: captured graphs.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::{RT_CAPTURE_IMPLICIT, rule};
use crate::ffi::{Out, plain};
use crate::registry::Handle;
use crate::runtime::capture;
use crate::runtime::capture::Replay;
use crate::runtime::stream::{Stream, Work};

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureBegin(stream: Handle, mode: i32) -> i32 {
    plain("aclmdlRICaptureBegin", || {
        rule!(stream != 0, RT_CAPTURE_IMPLICIT, "the default stream cannot be captured");
        capture::begin(&Stream::from_handle(stream)?, mode)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureEnd(stream: Handle, graph: Out<Handle>) -> i32 {
    plain("aclmdlRICaptureEnd", || graph.put(capture::end(&Stream::from_handle(stream)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureGetInfo(stream: Handle, status: Out<i32>, graph: Out<Handle>) -> i32 {
    plain("aclmdlRICaptureGetInfo", || {
        graph.put_if_asked(0);
        status.put(capture::status(&*Stream::from_handle(stream)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureTaskGrpBegin(stream: Handle) -> i32 {
    plain("aclmdlRICaptureTaskGrpBegin", || capture::begin_group(&*Stream::from_handle(stream)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureTaskGrpEnd(stream: Handle, group: Out<Handle>) -> i32 {
    plain("aclmdlRICaptureTaskGrpEnd", || group.put(capture::end_group(&*Stream::from_handle(stream)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureTaskUpdateBegin(stream: Handle, group: Handle) -> i32 {
    plain("aclmdlRICaptureTaskUpdateBegin", || capture::begin_update(&*Stream::from_handle(stream)?, group))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureTaskUpdateEnd(stream: Handle) -> i32 {
    plain("aclmdlRICaptureTaskUpdateEnd", || capture::end_update(&*Stream::from_handle(stream)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIExecuteAsync(graph: Handle, stream: Handle) -> i32 {
    plain("aclmdlRIExecuteAsync", || {
        let stream = Stream::from_handle(stream)?;
        stream.submit(Work::Replay(Replay::from_handle(graph)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIDestroy(graph: Handle) -> i32 {
    plain("aclmdlRIDestroy", || capture::destroy(graph))
}
