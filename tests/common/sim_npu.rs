//! A simulated Ascend card for one test at a time: the simulator's state is the process's.

#![allow(dead_code)] // each test file uses a part

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use ascend_llm::device::ascend::{AscendDevice, AscendOpenError, AscendOptions};
use ascend_sim::Simulator;
use parking_lot::{Mutex, MutexGuard};

static SIMULATOR: LazyLock<Simulator> =
    LazyLock::new(|| Simulator::beside_this_binary().expect("cargo builds the simulator beside its tests"));
static TURN: Mutex<()> = Mutex::new(());

/// The simulator, for as long as this lives.
pub struct Npu {
    pub sim: &'static Simulator,
    /// The library's file, if it is a copy.
    copy: Option<PathBuf>,
    _turn: MutexGuard<'static, ()>,
}

impl Drop for Npu {
    fn drop(&mut self) {
        if let Some(file) = &self.copy {
            // It stays loaded; a file that is left is in a folder for such.
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Npu {
    /// The simulator as at the start.
    pub fn new() -> Self {
        let turn = TURN.lock();
        SIMULATOR.reset();
        Self { sim: &SIMULATOR, copy: None, _turn: turn }
    }

    /// The simulator, set up by name and number.
    pub fn with(settings: &[(&str, i64)]) -> Self {
        let npu = Self::new();
        for (name, value) in settings {
            npu.sim.set(name, *value);
        }
        npu
    }

    /// A simulator of its own whose library lacks some functions, as an older version does. Each call loads another copy, for
    /// good.
    pub fn lacking(symbols: &[&str]) -> Self {
        static COPIES: AtomicU32 = AtomicU32::new(0);
        let turn = TURN.lock();
        let copy = COPIES.fetch_add(1, Ordering::Relaxed);
        let name = format!("libascend_lacking_{}_{copy}.so", std::process::id());
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        SIMULATOR.without(symbols, &file).expect("a copy");
        let sim = Box::leak(Box::new(Simulator::open(&file).expect("a library")));
        Self { sim, copy: Some(file), _turn: turn }
    }

    pub fn try_device(&self, change: impl FnOnce(&mut AscendOptions)) -> Result<Arc<AscendDevice>, AscendOpenError> {
        let mut options = AscendOptions::default();
        options.library = Some(self.sim.path().to_owned());
        change(&mut options);
        AscendDevice::open(options)
    }

    pub fn device(&self) -> Arc<AscendDevice> {
        self.try_device(|_| ()).expect("the simulated card opens")
    }

    /// What opening a copy of the library gives that lacks some functions.
    pub fn sim_without(&self, symbols: &[&str]) -> Result<Arc<AscendDevice>, AscendOpenError> {
        let file = self.library_without(symbols);
        self.try_device(|options| options.library = Some(file))
    }

    /// A copy of the library that lacks some functions.
    pub fn library_without(&self, symbols: &[&str]) -> PathBuf {
        let file =
            std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("libascend_without_{}.so", symbols[0]));
        // A copy that is loaded already must not change: the new one is another file of that name.
        let fresh = file.with_extension("fresh");
        self.sim.without(symbols, &fresh).expect("a copy");
        std::fs::rename(&fresh, &file).expect("the copy takes its name");
        file
    }

    /// The first `count` cards, one rank of a model each.
    pub fn cards(&self, count: u32) -> Arc<AscendDevice> {
        self.try_device(|options| options.cards = (0..count).collect()).expect("the simulated cards open")
    }

    /// Operation by operation.
    pub fn eager(&self) -> Arc<AscendDevice> {
        self.try_device(|options| options.capture = false).expect("the simulated card opens")
    }

    /// Nothing is left on the card, and nothing was done that a real one would not forgive.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert_eq!(self.sim.complaints(), [""; 0], "complaints");
        for sort in
            ["device_blocks", "pinned_blocks", "streams", "events", "contexts", "graphs", "executors", "descriptors"]
        {
            assert_eq!(self.sim.live(sort), 0, "{sort} left");
        }
    }
}
