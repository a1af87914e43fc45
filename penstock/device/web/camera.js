// The camera: which there are, the one that is open, and why there is none.

/** There is no picture to be had; the message says why. */
export class CameraProblem extends Error {}

// As much as networks look at: more pixels only cost time.
const SIZE = { width: { ideal: 640 }, height: { ideal: 480 } };

/** Opens a camera, the one that looks away from whoever holds the device where none is chosen. */
export async function openCamera(deviceId) {
  if (!navigator.mediaDevices) throw new CameraProblem("This browser lets pages have no camera.");
  const which = deviceId ? { deviceId: { exact: deviceId } } : { facingMode: { ideal: "environment" } };
  try {
    return await navigator.mediaDevices.getUserMedia({ video: { ...which, ...SIZE } });
  } catch (error) {
    throw new CameraProblem(REASONS[error.name] ?? `The camera cannot be opened: ${error.message || error.name}`);
  }
}

const REASONS = {
  NotAllowedError: "The browser may not use the camera. Allow it beside the address of this page, and try again.",
  NotFoundError: "There is no camera. Plug one in and try again, or choose a photo.",
  NotReadableError: "The camera gives no picture; another program may be using it. Close that one and try again.",
  OverconstrainedError: "That camera is not there any more. Choose another.",
};

/** The cameras that there are; browsers name them once one was allowed. */
export async function cameras() {
  const devices = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  return devices
    .filter(({ kind, deviceId }) => kind === "videoinput" && deviceId)
    .map(({ deviceId, label }, index) => ({ id: deviceId, name: label || `Camera ${index + 1}` }));
}

/** A camera that looks at whoever holds the device is shown as a mirror; the network sees it as it is. */
export const isFront = (track) => track.getSettings().facingMode === "user";
