//! The two phases of an operation: phase 1 checks and plans on the host, phase 2 queues the task.

use crate::codes::{Done, Fail, OP_INNER_NULL, OP_INVALID, fail, rule};
use crate::control::{self, Fault};
use crate::ffi::{Out, plain};
use crate::operands::Bench;
use crate::registry::{Handle, Registry, lock};
use crate::runtime::memory::{DeviceMemory, GRANULE, POISON, computes, memory};
use crate::runtime::stream::{Stream, Work};
use crate::runtime::task::{Cost, Task};
use crate::runtime::{context, task};
use crate::settings::Setting;
use crate::tensor::{TENSORS, View};
use std::sync::{Arc, Mutex};

pub(crate) static EXECUTORS: Registry<Executor> = Registry::new("aclOpExecutor");

/// A runtime failure inside an operation; the runtime's own code becomes the thread's last error.
const OP_RUNTIME: i32 = 361_001;

/// Computation of an operation over its operands.
pub(crate) type Kernel = Arc<dyn Fn(&mut Bench<'_>) -> Done + Send + Sync>;

/// Position of an operand in the operation's signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Input(usize),
    /// The first element of a tensor list among the inputs.
    Listed(usize),
    Output(usize),
}

#[derive(Clone, Debug)]
pub(crate) struct Operand {
    place: Place,
    view: Option<View>,
}

pub(crate) fn input(index: usize, view: &View) -> Operand {
    Operand { place: Place::Input(index), view: Some(view.clone()) }
}

pub(crate) fn maybe(index: usize, view: Option<&View>) -> Operand {
    Operand { place: Place::Input(index), view: view.cloned() }
}

pub(crate) fn listed(index: usize, view: &View) -> Operand {
    Operand { place: Place::Listed(index), view: Some(view.clone()) }
}

pub(crate) fn output(index: usize, view: &View) -> Operand {
    Operand { place: Place::Output(index), view: Some(view.clone()) }
}

/// Result of phase 1. Kernels number the operands in this order.
pub(crate) struct Prepared {
    pub(crate) operands: Vec<Operand>,
    pub(crate) cost: Cost,
    pub(crate) workspace_bytes: u64,
    pub(crate) can_repeat: bool,
    pub(crate) kernel: Kernel,
}

impl Prepared {
    /// A kernel over operands; by default its cost is one read or write of each operand.
    pub(crate) fn new(operands: Vec<Operand>, kernel: impl Fn(&mut Bench<'_>) -> Done + Send + Sync + 'static) -> Self {
        let bytes = operands.iter().filter_map(|operand| operand.view.as_ref()).map(|view| view.bytes() as u64).sum();
        Self {
            operands,
            cost: Cost { bytes, ..Cost::default() },
            workspace_bytes: 0,
            can_repeat: true,
            kernel: Arc::new(kernel),
        }
    }

    pub(crate) fn cube(mut self, operations: usize) -> Self {
        self.cost.cube = operations as u64;
        self
    }

    pub(crate) fn vector(mut self, operations: usize) -> Self {
        self.cost.vector = operations as u64;
        self
    }

    pub(crate) fn bytes(mut self, bytes: usize) -> Self {
        self.cost.bytes = bytes as u64;
        self
    }

    pub(crate) fn workspace(mut self, bytes: usize) -> Self {
        self.workspace_bytes = bytes as u64;
        self
    }

    /// Marks an operation that copies operands internally, which cannot be repeated.
    pub(crate) fn once(mut self) -> Self {
        self.can_repeat = false;
        self
    }
}

pub(crate) struct Executor {
    name: &'static str,
    prepared: Mutex<Prepared>,
    is_repeatable: Mutex<bool>,
}

/// Phase 1: checks the operation and creates its executor.
pub(crate) fn query(
    call: &'static str,
    name: &'static str,
    workspace_bytes: Out<u64>,
    executor: Out<Handle>,
    prepare: impl FnOnce() -> Done<Prepared>,
) -> i32 {
    plain(call, || {
        context::current().map_err(inside)?;
        task::host_works(Setting::query_ns);
        rule!(
            !workspace_bytes.is_null() && !executor.is_null(),
            crate::codes::OP_NULL,
            "a place for an answer is null"
        );
        let prepared = prepare()?;
        workspace_bytes.put(prepared.workspace_bytes)?;
        let made = Executor { name, prepared: Mutex::new(prepared), is_repeatable: Mutex::new(false) };
        executor.put(EXECUTORS.add(Arc::new(made)))
    })
}

/// Phase 2: queues the operation.
pub(crate) fn launch(
    name: &'static str,
    workspace: usize,
    workspace_bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    let code = plain(name, || {
        let taken = EXECUTORS.get(executor, OP_INNER_NULL)?;
        rule!(taken.name == name, OP_INNER_NULL, "the executor is one of {}", taken.name);
        if !*lock(&taken.is_repeatable) {
            EXECUTORS.remove(executor, OP_INNER_NULL)?;
        }
        let stream = Stream::from_handle(stream).map_err(inside)?;
        let prepared = lock(&taken.prepared);
        let needed = prepared.workspace_bytes;
        rule!(workspace_bytes >= needed, OP_INVALID, "a workspace of {workspace_bytes} bytes; {needed} are needed");
        check_memory(&prepared.operands, workspace, needed)?;
        let fault = control::task_fault(name);
        let task = Task {
            name,
            before: None,
            body: body(&prepared, workspace, needed, fault.is_some_and(|(fault, _)| fault == Fault::Overflow)),
            cost: prepared.cost,
            fault,
            is_op: true,
            workspace_bytes: needed,
        };
        stream.submit(Work::Task(Arc::new(task))).map_err(inside)
    });
    if code != 0 {
        // Phase 2 frees the executor whether it succeeds or not.
        drop(EXECUTORS.drain_one(executor, |left| !*lock(&left.is_repeatable)));
    }
    code
}

/// Converts a runtime failure to the failure of an operation.
fn inside(fail: Fail) -> Fail {
    control::note_error(fail.code);
    Fail::new(OP_RUNTIME, format!("runtime error {}: {}", fail.code, fail.message))
}

/// Checks that operands and workspace are in device memory. Operands need 32 bytes after their rounded end.
fn check_memory(operands: &[Operand], workspace: usize, needed: u64) -> Done {
    let memory = memory();
    let check = |what: &str, address: usize, bytes: usize| match memory.check(address, bytes) {
        Ok(()) => Ok(()),
        Err(fail) => fail!(OP_INVALID, "{what}: {}", fail.message),
    };
    for Operand { place, view } in operands {
        let Some(view) = view else { continue };
        if view.is_contiguous() {
            let start = view.address + view.offset * view.elem.bits() / 8;
            check(&format!("{place:?}"), start, view.bytes().next_multiple_of(GRANULE) + GRANULE)?;
        }
    }
    if needed > 0 {
        check("workspace", workspace, usize::try_from(needed).unwrap_or(usize::MAX))?;
    }
    Ok(())
}

fn body(prepared: &Prepared, workspace: usize, needed: u64, overflows: bool) -> task::Body {
    let views: Vec<Option<View>> = prepared.operands.iter().map(|operand| operand.view.clone()).collect();
    let first_output = prepared.operands.iter().position(|operand| operand.place == Place::Output(0));
    let kernel = prepared.kernel.clone();
    let needed = usize::try_from(needed).unwrap_or(usize::MAX);
    Arc::new(move |memory: &mut DeviceMemory| {
        if !computes() {
            return Ok(());
        }
        if needed > 0 {
            // A kernel leaves garbage in its workspace, so no other data may be stored there.
            memory.bytes_mut(workspace, needed)?.fill(POISON);
        }
        let mut bench = Bench { memory, views: &views };
        kernel(&mut bench)?;
        if let Some(output) = first_output.filter(|_| overflows) {
            let view = bench.view(output);
            bench.put(&view, view.offset, &[f32::INFINITY])?;
        }
        Ok(())
    })
}

/// Makes an executor repeatable.
pub(crate) fn make_repeatable(executor: Handle) -> Done {
    let taken = EXECUTORS.get(executor, OP_INNER_NULL)?;
    rule!(lock(&taken.prepared).can_repeat, OP_INVALID, "{} cannot be repeated", taken.name);
    *lock(&taken.is_repeatable) = true;
    Ok(())
}

pub(crate) fn destroy(executor: Handle) -> Done {
    EXECUTORS.remove(executor, OP_INNER_NULL).map(drop)
}

/// Changes the address of an operand of a repeatable executor.
pub(crate) fn rebind(executor: Handle, place: Place, tensor: Option<Handle>, address: usize) -> Done {
    let taken = EXECUTORS.get(executor, OP_INNER_NULL)?;
    rule!(*lock(&taken.is_repeatable), OP_INVALID, "the executor of {} is not repeatable", taken.name);
    rule!(
        address.is_multiple_of(GRANULE) && address != 0,
        OP_INVALID,
        "{address:#x} is not aligned to {GRANULE} bytes"
    );
    if let Some(tensor) = tensor {
        TENSORS.get(tensor, OP_INVALID)?;
    }
    let mut prepared = lock(&taken.prepared);
    let found = prepared.operands.iter_mut().find(|operand| operand.place == place);
    match found.and_then(|operand| operand.view.as_mut()) {
        Some(view) => {
            view.address = address;
            Ok(())
        }
        None => fail!(OP_INVALID, "{} has no tensor at {place:?}", taken.name),
    }
}
