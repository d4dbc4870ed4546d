//! A card's figures have plain units, and a missing figure is a typed error.

use crate::common;
use ascend_sys::{AscendErrorKind, Context, Dcmi, DeviceBuffer, Health, Library, LoadError, Pages, Runtime, Unit};
use std::path::Path;

#[test]
fn a_card_tells_its_figures() {
    let _turn = common::turn();
    let sim = common::simulator();
    sim.set("devices", 2);
    sim.set("power_dw", 2345);
    sim.set("aicore_mhz", 1500);
    sim.set("health", 2);
    let dcmi = Dcmi::open(Some(sim.path())).expect("opens");
    let card = dcmi.card(1).expect("card");
    assert_eq!((card.logic_id(), card.card_and_device()), (1, (1, 0)));
    assert_eq!(card.power_mw(), Ok(234_500));
    assert_eq!(card.rated_power_mw(), Ok(400_000));
    assert_eq!((card.aicore_mhz(), card.aicore_rated_mhz(), card.hbm_mhz()), (Ok(1500), Ok(1800), Ok(1600)));
    assert_eq!((card.celsius(), card.health()), (Ok(45), Ok(Health::Major)));
    assert_eq!(card.clock_reduction_causes(), Ok(0));
    for unit in [Unit::AiCore, Unit::VectorCore, Unit::Hbm, Unit::HbmBandwidth, Unit::Npu] {
        assert_eq!(card.utilization(unit), Ok(0), "{unit:?}");
    }
    let library = Library::open(Some(sim.path())).expect("opens");
    let runtime = Runtime::load(&library).expect("loads");
    runtime.init().expect("init");
    let context = Context::create(&runtime, 1).expect("context");
    let _block = DeviceBuffer::new(&context, 8 << 20, Pages::default()).expect("memory");
    let hbm = card.hbm().expect("memory");
    assert_eq!((hbm.total_bytes, hbm.used_bytes, hbm.mhz), (2 << 30, 8 << 20, 1600));
    let error = dcmi.card(2).expect_err("two cards");
    assert_eq!((error.code, error.kind), (-8007, AscendErrorKind::Usage));
}

#[test]
fn an_absent_library_or_function_is_an_error() {
    let _turn = common::turn();
    let sim = common::simulator();
    let path = Path::new("/nowhere/libdcmi.so");
    let error = Dcmi::open(Some(path)).expect_err("nothing there");
    assert_eq!(error, LoadError::NoCardFigures { path: path.into(), reason: "no such file".into() });
    assert!(error.to_string().contains("/usr/local/dcmi"), "{error}");

    let folder = std::env::temp_dir().join(format!("ascend-cards-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("folder");
    let (required, optional) = (folder.join("required.so"), folder.join("optional.so"));
    sim.without(&["dcmi_get_device_power_info"], &required).expect("copied");
    sim.without(&["dcmi_get_device_health"], &optional).expect("copied");
    let error = Dcmi::open(Some(&required)).expect_err("no power");
    assert_eq!(error, LoadError::MissingSymbol { library: required.clone(), symbol: "dcmi_get_device_power_info" });
    let card = Dcmi::open(Some(&optional)).expect("opens").card(0).expect("card");
    let error = card.health().expect_err("no health");
    assert_eq!((error.call, error.kind), ("dcmi_get_device_health", AscendErrorKind::Unsupported));
    assert!(card.power_mw().is_ok());
    std::fs::remove_dir_all(&folder).expect("removed");
}
