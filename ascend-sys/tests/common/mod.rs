//! A simulated device for one test at a time: context, stream, operations, and tensors with their values.

#![allow(dead_code)]

use ascend_sim::Simulator;
use ascend_sys::{
    AscendError, Context, DeviceAddress, DeviceBuffer, ElemType, Library, Op, Ops, Pages, Runtime, Stream, TensorDesc,
};
use half::{bf16, f16};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

static SIMULATOR: LazyLock<Simulator> =
    LazyLock::new(|| Simulator::beside_this_binary().expect("cargo builds the simulator beside its tests"));
static TURN: Mutex<()> = Mutex::new(());

/// Objects that a test uses. Fields are dropped in this order.
pub struct Rig {
    pub ops: Ops,
    pub stream: Stream,
    pub context: Context,
    pub runtime: Runtime,
    pub sim: &'static Simulator,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(|_| ())
    }

    /// `set_up` runs after the reset and before any object is created.
    pub fn with(set_up: impl FnOnce(&Simulator)) -> Self {
        let turn = turn();
        let sim = &*SIMULATOR;
        set_up(sim);
        let library = Library::open(Some(sim.path())).expect("the simulator opens");
        let runtime = Runtime::load(&library).expect("and has all functions");
        runtime.init().expect("init");
        let context = Context::create(&runtime, 0).expect("context");
        let stream = Stream::new(&context).expect("stream");
        let ops = Ops::load(&library, &runtime);
        assert_eq!(ops.missing(), [""; 0]);
        Self { ops, stream, context, runtime, sim, _turn: turn }
    }

    pub fn buffer(&self, bytes: usize) -> DeviceBuffer {
        DeviceBuffer::new(&self.context, bytes, Pages::default()).expect("memory")
    }

    /// Creates an uninitialized tensor.
    pub fn empty(&self, elem: ElemType, dims: &[usize]) -> Tensor {
        let count: usize = dims.iter().product();
        let buffer = self.buffer((count * elem.bits()).div_ceil(8));
        Tensor { desc: TensorDesc::new(buffer.address(), elem, dims), buffer, elem, count }
    }

    /// Creates a tensor of values, rounded to its type.
    pub fn tensor(&self, elem: ElemType, dims: &[usize], values: &[f32]) -> Tensor {
        let tensor = self.empty(elem, dims);
        assert_eq!(values.len(), tensor.count);
        tensor.buffer.write(0, &encode(elem, values)).expect("write");
        tensor
    }

    pub fn ints(&self, elem: ElemType, values: &[i64]) -> Tensor {
        let tensor = self.empty(elem, &[values.len()]);
        let bytes: Vec<u8> = match elem {
            ElemType::I64 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| i32::try_from(*v).expect("fits").to_le_bytes()).collect(),
        };
        tensor.buffer.write(0, &bytes).expect("write");
        tensor
    }

    /// Launches an operation with its own workspace and waits.
    pub fn run(&self, op: Result<Op, AscendError>) -> Result<(), AscendError> {
        let mut op = op?;
        let workspace = self.buffer(op.workspace_bytes().max(32));
        op.launch(workspace.address(), workspace.bytes(), &self.stream)?;
        self.stream.synchronize(None)
    }
}

impl Drop for Rig {
    /// A test that fails with work in the queue must not wait for it.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.sim.reset();
        }
    }
}

/// Acquires the simulator for one test and resets it.
pub fn turn() -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    SIMULATOR.reset();
    turn
}

pub fn simulator() -> &'static Simulator {
    &SIMULATOR
}

pub struct Tensor {
    pub desc: TensorDesc,
    pub buffer: DeviceBuffer,
    pub elem: ElemType,
    pub count: usize,
}

impl Tensor {
    pub fn at(&self) -> DeviceAddress {
        self.buffer.address()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; (self.count * self.elem.bits()).div_ceil(8)];
        self.buffer.read(0, &mut bytes).expect("read");
        bytes
    }

    /// Values of the tensor.
    pub fn values(&self) -> Vec<f32> {
        decode(self.elem, &self.bytes())
    }

    pub fn ints(&self) -> Vec<i64> {
        let bytes = self.bytes();
        match self.elem {
            ElemType::I64 => bytes.chunks(8).map(|b| i64::from_le_bytes(b.try_into().expect("8"))).collect(),
            ElemType::I32 => bytes.chunks(4).map(|b| i64::from(i32::from_le_bytes(b.try_into().expect("4")))).collect(),
            _ => bytes.iter().map(|&b| i64::from(b.cast_signed())).collect(),
        }
    }
}

pub fn encode(elem: ElemType, values: &[f32]) -> Vec<u8> {
    match elem {
        ElemType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        ElemType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        ElemType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        #[allow(clippy::cast_possible_truncation)]
        _ => values.iter().map(|v| (*v as i8).cast_unsigned()).collect(),
    }
}

pub fn decode(elem: ElemType, bytes: &[u8]) -> Vec<f32> {
    match elem {
        ElemType::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().expect("4"))).collect(),
        ElemType::F16 => bytes.chunks(2).map(|b| f16::from_le_bytes(b.try_into().expect("2")).to_f32()).collect(),
        ElemType::BF16 => bytes.chunks(2).map(|b| bf16::from_le_bytes(b.try_into().expect("2")).to_f32()).collect(),
        _ => bytes.iter().map(|&b| f32::from(b.cast_signed())).collect(),
    }
}

/// Rounds values to a storage type.
pub fn rounded(elem: ElemType, values: &[f32]) -> Vec<f32> {
    decode(elem, &encode(elem, values))
}

/// Pseudo-random values between about -1 and 1, reproducible from a seed, rounded to a type.
pub fn noise(elem: ElemType, count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    rounded(elem, &std::iter::repeat_with(next).take(count).collect::<Vec<_>>())
}

/// Relative precision of a type: the tolerance for results with another order of additions.
pub fn step(elem: ElemType) -> f32 {
    match elem {
        ElemType::F32 => 1e-5,
        ElemType::F16 => 1.0 / 1024.0,
        ElemType::BF16 => 1.0 / 128.0,
        _ => 0.0,
    }
}

/// Asserts that results agree within the precision of their type.
#[track_caller]
pub fn close(got: &[f32], want: &[f32], elem: ElemType) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let bound = step(elem) * w.abs().max(0.25) + 1e-6;
        assert!((g - w).abs() <= bound, "element {i}: {g} instead of {w}");
    }
}
