//! Devices and contexts, and the current context of each thread.

use crate::codes::{Done, Fail, RT_CONTEXT_NULL, RT_INVALID_DEVICE, RT_INVALID_HANDLE, rule};
use crate::registry::{Handle, Registry, lock};
use crate::runtime::stream;
use crate::runtime::stream::Stream;
use crate::settings::Setting;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

pub(crate) static CONTEXTS: Registry<Context> = Registry::new("context");

/// Default context of each device in use, with its reference count.
static DEFAULTS: LazyLock<Mutex<HashMap<i32, (Handle, u64)>>> = LazyLock::new(|| Mutex::new(HashMap::new()));

thread_local! {
    static CURRENT: Cell<Handle> = const { Cell::new(0) };
}

pub(crate) struct Context {
    pub(crate) device: i32,
    pub(crate) is_default: bool,
    /// Failure after which the context runs no more tasks.
    stopped: Mutex<Option<Fail>>,
    default_stream: Mutex<Option<Arc<Stream>>>,
}

impl Context {
    fn add(device: i32, is_default: bool) -> Handle {
        let context = Self { device, is_default, stopped: Mutex::new(None), default_stream: Mutex::new(None) };
        CONTEXTS.add(Arc::new(context))
    }

    /// Records a failure in stop mode; only the first one counts.
    pub(crate) fn stop(&self, fail: &Fail) {
        lock(&self.stopped).get_or_insert_with(|| fail.clone());
    }

    pub(crate) fn stopped(&self) -> Option<Fail> {
        lock(&self.stopped).clone()
    }

    /// Stream of a null handle.
    pub(crate) fn default_stream(self: &Arc<Self>) -> Arc<Stream> {
        lock(&self.default_stream).get_or_insert_with(|| Stream::start(self.clone())).clone()
    }

    fn end(&self) {
        if let Some(stream) = lock(&self.default_stream).take() {
            stream.close(true);
        }
    }
}

/// The calling thread's context.
pub(crate) fn current() -> Done<Arc<Context>> {
    CONTEXTS.get(CURRENT.get(), RT_CONTEXT_NULL)
}

pub(crate) fn current_handle() -> Handle {
    CURRENT.get()
}

pub(crate) fn set_current(handle: Handle) -> Done {
    CONTEXTS.get(handle, RT_INVALID_HANDLE)?;
    CURRENT.set(handle);
    Ok(())
}

fn check_device(device: i32) -> Done {
    let devices = Setting::devices.get();
    rule!((0..devices).contains(&i64::from(device)), RT_INVALID_DEVICE, "device {device} of {devices}");
    Ok(())
}

/// Binds the thread to a device's default context and increments its reference count.
pub(crate) fn set_device(device: i32) -> Done {
    check_device(device)?;
    let mut defaults = lock(&DEFAULTS);
    let (handle, count) = defaults.entry(device).or_insert_with(|| (Context::add(device, true), 0));
    *count += 1;
    CURRENT.set(*handle);
    Ok(())
}

/// Releases one reference or all; the last one destroys the default context.
pub(crate) fn reset_device(device: i32, all: bool) -> Done {
    check_device(device)?;
    let mut defaults = lock(&DEFAULTS);
    let Some((handle, count)) = defaults.get_mut(&device) else {
        return Ok(());
    };
    *count = if all { 0 } else { count.saturating_sub(1) };
    if *count > 0 {
        return Ok(());
    }
    let handle = *handle;
    defaults.remove(&device);
    drop(defaults);
    if all {
        stream::close_all(|stream| stream.context.device == device);
    }
    CONTEXTS.remove(handle, RT_INVALID_HANDLE)?.end();
    Ok(())
}

/// Creates an explicit context and makes it current.
pub(crate) fn create(device: i32) -> Done<Handle> {
    check_device(device)?;
    let handle = Context::add(device, false);
    CURRENT.set(handle);
    Ok(handle)
}

/// Destroys an explicit context and its streams.
pub(crate) fn destroy(handle: Handle) -> Done {
    let context = CONTEXTS.get(handle, RT_INVALID_HANDLE)?;
    rule!(!context.is_default, RT_INVALID_HANDLE, "a default context is not destroyed but reset with its device");
    stream::close_all(|stream| Arc::ptr_eq(&stream.context, &context));
    context.end();
    CONTEXTS.remove(handle, RT_INVALID_HANDLE)?;
    if CURRENT.get() == handle {
        CURRENT.set(0);
    }
    Ok(())
}

/// Resets the state, for tests.
pub(crate) fn reset() {
    lock(&DEFAULTS).clear();
    for context in CONTEXTS.all() {
        context.end();
    }
    CONTEXTS.clear();
    CURRENT.set(0);
}
