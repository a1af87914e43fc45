// Open and list cameras.

/** The camera cannot be used; the message has the reason. */
export class CameraProblem extends Error {}

// Networks use no more pixels than this.
const SIZE = { width: { ideal: 640 }, height: { ideal: 480 } };

/** Open a camera; by default the one on the back of the device. */
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

/** List the cameras; browsers name them only after one was allowed. */
export async function cameras() {
  const devices = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  return devices
    .filter(({ kind, deviceId }) => kind === "videoinput" && deviceId)
    .map(({ deviceId, label }, index) => ({ id: deviceId, name: label || `Camera ${index + 1}` }));
}

/** True for a front camera, which is displayed mirrored; the network gets the picture unmirrored. */
export const isFront = (track) => track.getSettings().facingMode === "user";
